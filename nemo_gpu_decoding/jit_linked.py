"""Save compile time: compile functions together with their callers, if only compiled code calls them.

By default, numba optimises each function together with its callees, and generates machine code and a Python
wrapper, again for each caller. With five levels of calls, numba compiles the innermost loop six times.
"""

import ctypes
from typing import Any

from numba import _dynfunc  # type: ignore[attr-defined]
from numba.core import types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering


class _LinkedOnly(JITCodeLibrary):
    """A code library of numba that is neither optimised nor compiled alone: its callers link and optimise it."""

    def finalize(self) -> None:
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalize_dynamic_globals()
        self._finalized = True


@ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
def _not_from_python(*_: int) -> None:
    """Stand in for a linked function that Python calls: the null result makes Python raise a SystemError."""


@register_pass(mutates_CFG=True, analysis_only=False)
class _LinkedLowering(NativeLowering):
    _name = "linked_lowering"

    def run_pass(self, state: Any) -> bool:
        target = state.targetctx
        if _holds_arrays(state.return_type):  # a caller with reference counts would free them
            raise TypeError(
                f"{state.func_id.func_qualname} returns {state.return_type}, expected no arrays: use inlined"
            )
        state.library = _LinkedOnly(target.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        lowered = state["cr"]
        state.library.finalize()
        name, module = lowered.fndesc.qualname.split(".")[-1], lowered.fndesc.lookup_module()
        address = ctypes.cast(_not_from_python, ctypes.c_void_p).value
        function = _dynfunc.make_function(
            module, name, "called by compiled code", address, lowered.env, (state.library,)
        )
        target.insert_user_function(function, lowered.fndesc, [state.library])
        state["cr"] = lowered._replace(cfunc=function)
        return True


def _holds_arrays(kind: Any) -> bool:
    if isinstance(kind, types.BaseTuple):
        members: Any = kind
        return any(map(_holds_arrays, members))
    return isinstance(kind, types.Buffer)


class LinkedCompiler(CompilerBase):
    """A compiler pipeline of numba that generates LLVM code for callers to link, and no machine code."""

    def define_pipelines(self) -> list[Any]:
        pipeline = DefaultPassBuilder.define_nopython_pipeline(self.state)
        pipeline.passes = [
            (_LinkedLowering if kind is NativeLowering else kind, name) for kind, name in pipeline.passes
        ]
        pipeline.finalize()
        return [pipeline]
