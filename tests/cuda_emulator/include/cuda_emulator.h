// What a kernel sees of the emulator: CUDA C++ as g++ understands it. Included before the kernel's text.
#pragma once
#define __CUDA_EMULATOR__ 1

#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <utility>

#include "language.h"
#include "engine.h"
#include "barriers.h"
#include "warp_ops.h"
#include "atomics.h"
#include "async_copy.h"
#include "intrinsics.h"
#include "entry.h"
