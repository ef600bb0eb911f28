// A library in the place of NVIDIA's libcuda.so.1: it prints what cuda-python hands to it, byte by byte.
// It stands for a driver with one device and one kernel, axpy(float* x, float a, int n, bool last).
#include <stdio.h>
#include <string.h>

enum { SIZE = 24 };  // of the only argument

static int cuInit(unsigned flags) { return 0; }
static int cuDriverGetVersion(int* version) { return *version = 12080, 0; }
static int cuDeviceGet(int* device, int index) { return *device = 40 + index, 0; }
static int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = (void*)(size_t)(device * 2), 0; }
static int cuCtxPushCurrent(void* context) { return printf("push %zu\n", (size_t)context), 0; }
static int cuCtxPopCurrent(void** context) { return *context = 0, printf("pop\n"), 0; }
static int cuThreadExchangeStreamCaptureMode(int* mode) {
  static int current = 0;
  int before = current;
  printf("capture mode %d\n", *mode);
  current = *mode, *mode = before;
  return 0;
}
static int cuDeviceGetAttribute(int* value, int attribute, int device) {
  return *value = 101376, printf("device attribute %d of %d\n", attribute, device), 0;
}
static int cuModuleLoadData(void** module, const void* image) {
  return *module = (void*)7, printf("image %.12s\n", (const char*)image), 0;
}
static int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = (void*)9;
  return printf("function %s of %zu\n", name, (size_t)module), strcmp(name, "axpy") ? 500 : 0;
}
static int cuFuncGetAttribute(int* value, int attribute, void* function) { return *value = attribute ? 16 : 1024, 0; }
static int cuFuncSetAttribute(void* function, int attribute, int value) {
  return printf("set attribute %d of %zu to %d\n", attribute, (size_t)function, value), 0;
}
static int cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
  if (index > 0) return 1;
  return *offset = 0, *size = SIZE, 0;
}
static int cuGetErrorName(int error, const char** text) { return *text = "CUDA_ERROR_OF_THE_FAKE", 0; }
static int cuGetErrorString(int error, const char** text) { return *text = "as ordered", 0; }
static int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void* stream, void** parameters, void** extra) {
  printf("launch %zu grid %u %u %u block %u %u %u shared %u stream %zu extra %d:", (size_t)f, gx, gy, gz, bx, by,
         bz, shared, (size_t)stream, extra != 0);
  printf(" ");
  for (int k = 0; k < SIZE; ++k) printf("%02x", ((unsigned char*)parameters[0])[k]);
  printf("\n");
  return gx == 666 ? 719 : 0;
}

// As in cuda.h of CUDA 13.
struct NodeParams {
  int type, reserved0[3];
  struct { unsigned long long handle; int type; unsigned size; void** graphs; void* context; } conditional;
};
static int cuStreamCreate(void** stream, unsigned flags) {
  return *stream = (void*)1025, printf("stream with flags %u\n", flags), 0;
}
static int cuGraphCreate(void** graph, unsigned flags) { return *graph = (void*)256, 0; }
static int cuGraphConditionalHandleCreate(unsigned long long* handle, void* graph, void* context, unsigned value,
                                          unsigned flags) {
  *handle = 0xabcdef0123456789;
  return printf("condition in %zu of %zu: %u flags %u\n", (size_t)graph, (size_t)context, value, flags), 0;
}
static int cuGraphAddNode(void** node, void* graph, void** before, void* edges, size_t count, struct NodeParams* p) {
  static void* inner[] = {(void*)768};
  printf("node in %zu after %zu: type %d handle %llx kind %d size %u context %zu\n", (size_t)graph, count, p->type,
         p->conditional.handle, p->conditional.type, p->conditional.size, (size_t)p->conditional.context);
  p->conditional.graphs = inner;
  return *node = (void*)513, before || edges;
}
static int cuStreamBeginCaptureToGraph(void* stream, void* graph, void** before, void* edges, size_t count, int mode) {
  printf("begin %zu in %zu after %zu mode %d\n", (size_t)stream, (size_t)graph, count, mode);
  return before || edges;
}
static int cuStreamEndCapture(void* stream, void** graph) {
  return *graph = (void*)768, printf("end %zu\n", (size_t)stream), 0;
}
static int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long flags) {
  return *executable = (void*)1280, printf("instantiate %zu flags %llu\n", (size_t)graph, flags), 0;
}
static int cuGraphDestroy(void* graph) { return printf("destroy %zu\n", (size_t)graph), 0; }
static int cuGraphLaunch(void* graph, void* stream) {
  return printf("launch %zu on %zu\n", (size_t)graph, (size_t)stream), 0;
}
static int cuGraphExecDestroy(void* graph) { return printf("destroy executable %zu\n", (size_t)graph), 0; }

#define ENTRY(name) {#name, (void*)name}
static const struct { const char* name; void* function; } ENTRIES[] = {
    ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuDeviceGet), ENTRY(cuDevicePrimaryCtxRetain),
    ENTRY(cuCtxPushCurrent), ENTRY(cuCtxPopCurrent), ENTRY(cuThreadExchangeStreamCaptureMode),
    ENTRY(cuDeviceGetAttribute), ENTRY(cuModuleLoadData), ENTRY(cuModuleGetFunction), ENTRY(cuFuncGetAttribute),
    ENTRY(cuFuncSetAttribute), ENTRY(cuFuncGetParamInfo), ENTRY(cuGetErrorName), ENTRY(cuGetErrorString),
    ENTRY(cuLaunchKernel), ENTRY(cuStreamCreate), ENTRY(cuGraphCreate), ENTRY(cuGraphConditionalHandleCreate),
    ENTRY(cuGraphAddNode), ENTRY(cuStreamBeginCaptureToGraph), ENTRY(cuStreamEndCapture),
    ENTRY(cuGraphInstantiateWithFlags), ENTRY(cuGraphDestroy), ENTRY(cuGraphLaunch), ENTRY(cuGraphExecDestroy)};

// How cuda-python finds all the other functions.
int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long long flags, int* found) {
  *function = 0;
  for (size_t i = 0; i < sizeof(ENTRIES) / sizeof(ENTRIES[0]); ++i)
    if (!strcmp(name, ENTRIES[i].name)) *function = ENTRIES[i].function;
  if (found) *found = *function ? 0 : 1;
  return *function ? 0 : 500;
}
