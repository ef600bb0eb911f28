"""Translates PTX, as NVRTC emits it, to C++ that runs on the emulator's fibers.

    @%p1 bra $L__BB0_3;              if (p1) goto L__BB0_3;
    add.s32 %r3, %r1, -4;            r3 = uint32_t(r1 + 0xfffffffcu);
    ld.shared.v2.f32 {%f1, %f2}, [%r3+8];
                                     { auto v = load<Space::shared, float, 2, Access::read>(uint32_t(r3 + 8));
                                       f1 = v.at[0]; f2 = v.at[1]; }

Registers become variables, labels stay labels, lines of the source become `#line`, so that messages name them. In a
straight line of code loads come first, as in machine code. What an instruction means is in include/ptx.h. Forms that
are in no table here are refused: a compiler that emits others gets an error, not a guess.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field


class UnknownPTXError(ValueError):
    """A construct that this translator does not know; the message holds it."""


C_TYPES = {
    **{f"u{bits}": f"uint{bits}_t" for bits in (8, 16, 32, 64)},
    **{f"b{bits}": f"uint{bits}_t" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)},
    "f32": "float",
    "f64": "double",
    "pred": "bool",
}

# Operation -> "result: operands: C++". One letter per type: T the instruction's own, U the same without
# its sign (overflow wraps), D of twice its width, W 32 bits, P a predicate. {T} stands for the C++ type.
OPERATIONS = {
    **dict.fromkeys(("add", "add.rn"), "U: UU: {a} + {b}"),
    **dict.fromkeys(("sub", "sub.rn"), "U: UU: {a} - {b}"),
    **dict.fromkeys(("mul.lo", "mul.rn"), "U: UU: {a} * {b}"),
    "mul.wide": "D: TT: {D}({a}) * {D}({b})",
    "mad.lo": "U: UUU: {a} * {b} + {c}",
    "div": "T: TT: divided<{T}>({a}, {b})",
    "rem": "T: TT: remainder_of<{T}>({a}, {b})",
    "neg": "U: U: -{a}",
    "abs": "T: T: fabs({a})",
    "min": "T: TT: minimum<{T}>({a}, {b})",
    "max": "T: TT: maximum<{T}>({a}, {b})",
    "and": "U: UU: {a} & {b}",
    "or": "U: UU: {a} | {b}",
    "xor": "U: UU: {a} ^ {b}",
    "not": "U: U: ~{a}",
    "shl": "U: UW: shifted_left<{U}>({a}, {b})",
    "shr": "T: TW: shifted_right<{T}>({a}, {b})",
    "bfi": "U: UUWW: field_inserted<{U}>({a}, {b}, {c}, {d})",
    "bfind.shiftamt": "W: U: {a} ? __builtin_clz({a}) : 0xffffffffu",
    "brev": "U: U: reversed({a})",
    "popc": "W: U: __builtin_popcountll({a})",
    "selp": "T: TTP: {c} ? {a} : {b}",
    "fma.rn": "T: TTT: {T}(std::fma({a}, {b}, {c}))",
    "fma.rm": "T: TTT: fma_down({a}, {b}, {c})",
    "div.rn": "T: TT: {a} / {b}",
    "rcp.rn": "T: T: 1 / {a}",
    "rcp.approx.ftz": "T: T: approximate_reciprocal({a})",
    "sqrt.rn": "T: T: sqrt({a})",
    "ex2.approx.ftz": "T: T: flushed(exp2f(flushed({a})))",
    "copysign": "T: TT: {T}(copysign({b}, {a}))",
    "cvta.shared": "T: T: {a} + SHARED_WINDOW",
    "cvta.to.shared": "T: T: generic_to_shared({a})",
    "cvta.to.global": "T: T: {a}",
}
PREDICATES = {"and": "{a} && {b}", "or": "{a} || {b}", "xor": "{a} != {b}", "not": "!{a}"}

# Comparison -> C++; with a `u` behind it, true of NaNs
COMPARISONS = {
    "eq": "{a} == {b}", "lt": "{a} < {b}", "le": "{a} <= {b}", "gt": "{a} > {b}", "ge": "{a} >= {b}",
    "ltu": "!({a} >= {b})", "leu": "!({a} > {b})", "gtu": "!({a} <= {b})", "geu": "!({a} < {b})",
    "neu": "{a} != {b}", "equ": "!({a} < {b} || {a} > {b})", "nan": "{a} != {a} || {b} != {b}",
}  # fmt: skip
ATOMICS = {
    "add": "old + {b}", "exch": "{b}", "min": "minimum<{T}>(old, {b})", "max": "maximum<{T}>(old, {b})",
    "cas": "old == {b} ? {c} : old",
}  # fmt: skip
# to, from -> C++ where a cast would not do
CONVERSIONS = {"cvt.rzi.s64.f32": "truncated({a})", "cvt.sat.f32.f32": "saturated({a})"}
CASTS = {"cvt", "cvt.rn"}  # to the nearest, ties to even: as C++'s
SPECIAL = {
    f"%{name}.{axis}": f"shown.{where}.{axis}"
    for name, where in (
        ("tid", "thread->thread_index"), ("ctaid", "thread->block_index"),
        ("ntid", "options.block"), ("nctaid", "options.grid"),
    )
    for axis in "xyz"
}  # fmt: skip

_HEADER = re.compile(
    r"(?:\.visible |\.weak )?\.(?P<kind>entry|func)\s*(?P<result>\([^()]*\))?\s*(?P<name>[\w$]+)\s*"
    r"\((?P<parameters>[^()]*)\)(?P<hints>[^{;]*)"
)
_PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.(\w+) (\w+)(?:\[(\d+)\])?")
_VARIABLE = re.compile(
    r"(?:\.visible |\.extern )?\.(global|shared) \.align (\d+) \.(\w+) (\w+)(\[\d*\])?(?: = (-?\d+))?"
)
_STATEMENT = re.compile(
    r"\s*(?:(?P<location>\.loc\s[^\n]*)|(?P<open>\{)|(?P<close>\})|\$(?P<label>\w+):|(?P<statement>[^;]+);)"
)
_LOADED = re.compile(r"\b(?:ld\.(?!param)|atom\.)\S+\s+(\{[^}]*\}|%\w+),")
# What no load passes, of statements
_KEEPS_ORDER = re.compile(r"(@!?%p\d+ )?(st|atom|bar|shfl|vote|cp|call|bra|ret|ld\.(volatile|relaxed)|ld\.param)\b|\.")
_ADDRESS = re.compile(r"\[(%?\w+)(?:\+(-?\d+))?\]")
_OPERANDS = re.compile(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+")


def translate(ptx: str) -> str:
    """The C++ of a module: its kernels with the emulator's entries, to be compiled without `cuda_emulator.h`."""
    ptx = re.sub(r"//[^\n]*", "", ptx.split("\t.section")[0])
    return _Module(ptx).cpp()


@dataclass
class _Module:
    ptx: str
    files: dict[str, str] = field(default_factory=dict)  # number -> name, of the source
    shared: dict[str, int] = field(default_factory=dict)  # static variables: name -> offset
    globals: dict[str, str] = field(default_factory=dict)  # name -> C++ declaration

    def cpp(self) -> str:
        static_bytes = self._read_variables()
        self.files = dict(re.findall(r'\.file\s+(\d+) "([^"]+)"', self.ptx))
        prototypes, bodies, kernels = [], [], []
        for header in _HEADER.finditer(self.ptx):
            rest = self.ptx[header.end() :]
            if not rest.startswith("{"):
                continue  # declared only
            function = _Function(self, header)
            prototypes.append(function.prototype + ";")
            bodies.append(function.body(rest[1:]))
            if function.is_kernel:
                kernels.append(header["name"])
        entries = [f"EMULATOR_ENTRY({kernel})" for kernel in kernels]
        return "\n".join([
            f"#define PTX_STATIC_BYTES {static_bytes}u",
            '#include "language.h"', "#include <cmath>", '#include "ptx.h"', "using namespace ptx;",
            *self.globals.values(), *prototypes, *bodies, *entries,
            f'EMULATOR_KERNELS("{" ".join(kernels)}")\n',
        ])  # fmt: skip

    def _read_variables(self) -> int:
        """Note the module's variables; returns the bytes of static shared memory."""
        end = 0
        for space, align, kind, name, length, value in _VARIABLE.findall(self.ptx):
            if space == "global":
                if length:
                    raise UnknownPTXError(f"an array in global memory: {name}{length}")
                self.globals[name] = f"static {C_TYPES[kind]} {name} = {_bits(kind, value or '0')};"
            elif length != "[]":  # smem is the dynamic array
                end = -(-end // int(align)) * int(align)
                self.shared[name] = end
                end += int(length[1:-1] if length else 1) * _size(kind)
        return end

    def shared_address(self, name: str) -> str | None:
        if name == "smem":
            return "SHARED_DYNAMIC"
        return f"(SHARED_BEGIN + {self.shared[name]}u)" if name in self.shared else None


class _Function:
    def __init__(self, module: _Module, header: re.Match[str]) -> None:
        self.module = module
        self.is_kernel = header["kind"] == "entry"
        self.name = header["name"]
        # what it was called with, and what calls in it are given: name -> bytes
        self.parameters = dict(_parameters(header["parameters"]))
        self.result = dict(_parameters(header["result"] or ""))
        self.scopes: list[dict[str, str]] = [{}]  # types of registers by name, or by name<>
        self.line = ""
        self.loaded: set[str] = set()  # registers that loads and atomics fill; r3 has a `Load loading_r3`
        self.reads: dict[str, None] = {}  # of these, those that the statement reads

    @property
    def prototype(self) -> str:
        linkage = "void" if self.is_kernel else "static __attribute__((noinline)) void"
        value = "" if self.is_kernel else "&"
        results = [f"Parameter<{size}>& {name}" for name, size in self.result.items()]
        parameters = [f"const Parameter<{size}>{value} {name}" for name, size in self.parameters.items()]
        return f"{linkage} {self.name}({', '.join(results + parameters)})"

    def body(self, text: str) -> str:
        """From behind the opening brace on, up to its closing one."""
        lines = [f"{self.prototype} {{ Waits waits;"]
        self.loaded = set(re.findall(r"%(\w+)", " ".join(_LOADED.findall(text.split("\n}")[0]))))
        used = sorted(set(re.findall(r"%([a-z]+\d+)\b", text.split("\n}")[0])))
        place = ""
        straight: list[tuple[str, str]] = []  # places and statements that may change their order
        for piece in _statements(text):
            if piece.lastgroup == "location":
                _, file, line, *_ = re.split(r"[\s,]+", piece["location"])
                place = f'\n#line {line} "{self.module.files[file]}"\n'  # of all up to the next
                continue
            statement = " ".join((piece["statement"] or "").split())
            if statement and not _KEEPS_ORDER.match(statement):
                straight.append((place, statement))
                continue
            lines += [at + self._statement(line, used) for at, line in _loads_first(straight)]
            straight = []
            if piece.lastgroup == "open":
                self.scopes.append({})
                lines.append("{")
            elif piece.lastgroup == "close":
                self.scopes.pop()
                lines.append("}")
            elif piece.lastgroup == "label":
                lines.append(f"{piece['label']}:;")
            else:
                lines.append(place + self._statement(statement, used))
        return " ".join(lines)

    def _statement(self, line: str, used: list[str]) -> str:
        self.line = line
        if line.startswith(".reg"):
            return self._registers(line, used)
        if line.startswith(".param"):
            self.parameters |= dict(_parameters(line))
            return " ".join(f"Parameter<{size}> {name};" for name, size in _parameters(line))
        if line.startswith((".pragma", ".shared")):
            return ""
        condition = ""
        if line.startswith("@"):
            guard, line = line.split(" ", 1)
            condition = f"if ({guard[1:].replace('%', '')}) "
        name, _, rest = line.partition(" ")
        operands = _OPERANDS.findall(rest)
        counted = "" if ".param" in name else f"count({str(_is_double(name)).lower()}); "
        self.reads = {}
        instruction = self._instruction(name, operands, rest)
        waits = "".join(f"waits.use(loading_{register}); " for register in self.reads)
        return f"{counted}{waits}{condition}{{ {instruction} }}"

    def _registers(self, line: str, used: list[str]) -> str:
        """Declare those that occur; `%r<9>` stands for %r0 to %r8."""
        _, kind, names = line.replace(".", "", 2).replace(" .", " ").split(" ", 2)
        declared = []
        for name in re.findall(r"%?([a-z_]+\d*)(?:<\d+>)?", names):
            several = f"%{name}<" in names
            self.scopes[-1][name + "<>" if several else name] = kind
            declared += [u for u in used if u.rstrip("0123456789") == name] if several else [name]
        loads = "".join(f" Load loading_{name};" for name in declared if name in self.loaded)
        return f"{C_TYPES[kind]} {', '.join(declared)};{loads}" if declared else ""

    def _type_of(self, register: str) -> str:
        for scope in reversed(self.scopes):
            for name in (register, register.rstrip("0123456789") + "<>"):
                if name in scope:
                    return C_TYPES[scope[name]]
        raise self._unknown()

    def _unknown(self) -> UnknownPTXError:
        return UnknownPTXError(f"{self.name}: {self.line}")

    # ------------------------------------------------------------------------------------- operands

    def read(self, operand: str, kind: str) -> str:
        """An operand as a value of the C++ type of `kind`."""
        c_type = C_TYPES[kind]
        if operand in SPECIAL:
            return SPECIAL[operand]
        if operand.startswith("%"):
            register = operand[1:]
            if register in self.loaded:
                self.reads[register] = None
            return register if self._type_of(register) == c_type else f"as<{c_type}>({register})"
        if re.fullmatch(r"-?\d+|0[fd][0-9A-Fa-f]+", operand):
            return _bits(kind, operand)
        if shared := self.module.shared_address(operand):
            return shared
        if operand in self.module.globals:
            return f"uint64_t(&{operand})"
        if operand in self.parameters and self.is_kernel:
            return "PARAM_WINDOW"
        raise self._unknown()

    def write(self, operand: str, kind: str, value: str) -> str:
        """The statement that puts a value of `kind` into a register."""
        if operand == "_":
            return f"(void)({value});"
        register, c_type = operand[1:], C_TYPES[kind]
        if self._type_of(register) == c_type:
            return f"{register} = {c_type}({value});"
        return f"put({register}, {c_type}({value}));"

    def _address(self, operand: str, space: str) -> str:
        match = _ADDRESS.fullmatch(operand)
        if not match:
            raise self._unknown()
        base, offset = match[1], int(match[2] or 0)
        kind = "u32" if not base.startswith("%") or self._type_of(base[1:]) == "uint32_t" else "u64"
        if (kind == "u32") != (space == "shared"):
            raise self._unknown()
        return f"{C_TYPES[kind]}({self.read(base, kind)} + {_bits(kind, str(offset))})"

    # --------------------------------------------------------------------------------- instructions

    def _instruction(self, name: str, operands: list[str], rest: str) -> str:
        head, *modifiers = name.split(".")
        special = getattr(self, f"_{head}", None)
        if special is not None:
            return special(name, modifiers, operands)
        operation, _, kind = name.rpartition(".")
        if kind == "pred" and operation in PREDICATES:
            form = "P: PP: " + PREDICATES[operation]
        elif operation in OPERATIONS and kind in C_TYPES:
            form = OPERATIONS[operation]
        else:
            raise self._unknown()
        result, kinds, expression = form.split(": ", 2)
        types = {
            "T": kind, "U": kind.replace("s", "u"), "D": f"{kind[0]}{2 * int(kind[1:] or 0) if kind != 'pred' else 0}",
            "W": "u32", "P": "pred",
        }  # fmt: skip
        values = {
            letter: self.read(operand, types[operand_kind])
            for letter, operand, operand_kind in zip("abcd", operands[1:], kinds, strict=False)
        }
        names = {letter: C_TYPES.get(of, "") for letter, of in types.items()}
        return self.write(operands[0], types[result], expression.format(**values, **names))

    def _mov(self, name: str, modifiers: list[str], operands: list[str]) -> str:
        (kind,), (to, value) = modifiers, operands
        if to.startswith("{"):  # a value's parts, the lowest first
            parts = _OPERANDS.findall(to[1:-1])
            of = f"u{8 * _size(kind) // len(parts)}"
            whole = self.read(value, f"u{8 * _size(kind)}")
            shifts = [f"w >> {8 * _size(of) * i}" for i in range(len(parts))]
            writes = [self.write(part, of, shift) for part, shift in zip(parts, shifts, strict=True)]
            return f"auto w = {whole}; {' '.join(writes)}"
        if value.startswith("{"):
            parts = _OPERANDS.findall(value[1:-1])
            of, whole = f"u{8 * _size(kind) // len(parts)}", f"u{8 * _size(kind)}"
            values = [
                f"{C_TYPES[whole]}({self.read(part, of)}) << {8 * _size(of) * i}" for i, part in enumerate(parts)
            ]
            return self.write(to, whole, " | ".join(values))
        return self.write(to, kind, self.read(value, kind))

    def _setp(self, name: str, modifiers: list[str], operands: list[str]) -> str:
        (comparison, kind), (to, a, b) = modifiers, operands
        if comparison == "ne" and not kind.startswith("f"):
            comparison = "neu"
        if comparison not in COMPARISONS:
            raise self._unknown()
        values = {"a": self.read(a, kind), "b": self.read(b, kind)}
        return self.write(to, "pred", COMPARISONS[comparison].format(**values))

    def _cvt(self, name: str, modifiers: list[str], operands: list[str]) -> str:
        to, source = modifiers[-2:]
        value = self.read(operands[1], source)
        if name in CONVERSIONS:
            return self.write(operands[0], to, CONVERSIONS[name].format(a=value))
        if ".".join(["cvt", *modifiers[:-2]]) not in CASTS:
            raise self._unknown()
        return self.write(operands[0], to, f"{C_TYPES[to]}({value})")

    def _memory(self, modifiers: list[str], vector: str, address: str) -> tuple[str, list[str], str]:
        """What loads and stores share: C++ template arguments and address, the registers, their type."""
        kind = modifiers[-1]
        known = {"volatile", "relaxed", "gpu", "global", "shared", "cg", "nc", "v2", "v4"}
        if set(modifiers[:-1]) - known:
            raise self._unknown()
        space = next((m for m in modifiers if m in ("global", "shared")), "generic")
        access = "atomic" if {"volatile", "relaxed", "cg"} & set(modifiers) else "read"
        registers = _OPERANDS.findall(vector.strip("{}"))
        arguments = f"<Space::{space}, {C_TYPES[kind]}, {len(registers)}, Access::{access}>"
        return f"{arguments}({self._address(address, space)}", registers, kind

    def _ld(self, name: str, modifiers: list[str], operands: list[str]) -> str:
        if modifiers[0] == "param":
            kind = modifiers[-1]
            registers = _OPERANDS.findall(operands[0].strip("{}"))
            name, offset = self._parameter(operands[1])
            call = f"load_parameter<{C_TYPES[kind]}, {len(registers)}>({name}, {offset})"
        else:
            start, registers, kind = self._memory(modifiers, operands[0], operands[1])
            call = f"load{start})"
        loading = self._loading(registers)
        if len(registers) == 1:
            return self.write(registers[0], kind, f"{call}.at[0]") + loading
        writes = [self.write(register, kind, f"v.at[{i}]") for i, register in enumerate(registers)]
        return f"auto v = {call}; {' '.join(writes)}{loading}"

    def _loading(self, registers: list[str]) -> str:
        """What notes that a load has begun to fill them."""
        return "".join(f" loading_{name[1:]} = waits.load();" for name in registers if name[1:] in self.loaded)

    def _st(self, name: str, modifiers: list[str], operands: list[str]) -> str:
        if modifiers[0] == "param":
            kind, registers = modifiers[-1], _OPERANDS.findall(operands[1].strip("{}"))
            start = f"_parameter<{C_TYPES[kind]}, {len(registers)}>({', '.join(self._parameter(operands[0]))}"
        else:
            start, registers, kind = self._memory(modifiers, operands[1], operands[0])
        return f"store{start}, {{{', '.join(self.read(register, kind) for register in registers)}}});"

    def _parameter(self, address: str) -> tuple[str, str]:
        """The parameter and the offset in it; from a register, that of the kernel's one parameter."""
        match = _ADDRESS.fullmatch(address)
        if not match:
            raise self._unknown()
        base, offset = match[1], match[2] or "0"
        if base.startswith("%"):
            (name,) = (n for n in self.parameters if n.startswith(f"{self.name}_param_"))
            return name, f"{base[1:]} + {offset} - PARAM_WINDOW"
        if base not in self.parameters | self.result:
            raise self._unknown()
        return base, offset

    def _atom(self, name: str, modifiers: list[str], operands: list[str]) -> str:
        *spaces, operation, kind = modifiers
        if operation not in ATOMICS or spaces not in ([], ["global"], ["shared"]):
            raise self._unknown()
        space, c_type = (spaces or ["generic"])[0], C_TYPES[kind]
        values = dict(zip("bc", (self.read(operand, kind) for operand in operands[2:]), strict=False))
        change = ATOMICS[operation].format(**values, T=c_type)
        call = f"atomic<Space::{space}, {c_type}>({self._address(operands[1], space)}, "
        write = self.write(operands[0], kind, f"{call}[&]({c_type} old) {{ return {c_type}({change}); }})")
        return write + self._loading(operands[:1])

    def _cp(self, name: str, modifiers: list[str], operands: list[str]) -> str:
        if name == "cp.async.commit_group":
            return "emulator::async_commit();"
        if name == "cp.async.wait_group":
            return f"wait_for_copies({operands[0]});"
        if name != "cp.async.cg.shared.global":
            raise self._unknown()
        to, source, size = operands
        return f"copy_async({self._address(to, 'shared')}, {self._address(source, 'global')}, {size});"

    def _shfl(self, name: str, modifiers: list[str], operands: list[str]) -> str:
        mode = modifiers[1]
        if mode not in ("up", "bfly", "idx") or modifiers[2] != "b32":
            raise self._unknown()
        value, _, in_range = operands[0].partition("|")
        inputs = ", ".join(self.read(operand, "u32") for operand in operands[1:])
        write = self.write(value, "u32", f"shuffle(Lane::{mode}, {inputs}, &in)")
        return f"bool in; {write} {self.write(in_range or '_', 'pred', 'in')}"

    def _vote(self, name: str, modifiers: list[str], operands: list[str]) -> str:
        kinds = {"vote.sync.ballot.b32": ("u32", ""), "vote.sync.any.pred": ("pred", " != 0")}
        if name not in kinds:
            raise self._unknown()
        (kind, rest), (to, vote, members) = kinds[name], operands
        call = f"ballot({self.read(vote, 'pred')}, {self.read(members, 'u32')})"
        return self.write(to, kind, call + rest)

    def _bar(self, name: str, modifiers: list[str], operands: list[str]) -> str:
        if name == "bar.warp.sync":
            return f"barrier_of_warp({self.read(operands[0], 'u32')});"
        votes = {"bar.red.or.pred": ("any", "pred"), "bar.red.popc.u32": ("count", "u32")}
        if operands[int(name in votes)] != "0":
            raise self._unknown()
        if name == "bar.sync" and len(operands) == 1:
            return "barrier(emulator::Vote::all, true);"
        if name not in votes:
            raise self._unknown()
        vote, kind = votes[name]
        return self.write(operands[0], kind, f"barrier(emulator::Vote::{vote}, {self.read(operands[2], 'pred')})")

    def _bra(self, name: str, modifiers: list[str], operands: list[str]) -> str:
        return f"goto {operands[0].removeprefix('$')};"

    def _ret(self, name: str, modifiers: list[str], operands: list[str]) -> str:
        return "return;"

    def _call(self, name: str, modifiers: list[str], operands: list[str]) -> str:
        match = re.fullmatch(r"call\.uni (?:\((\w+)\), )?([\w$]+)(?:, \(\s*([^()]*?)\s*\))?", self.line)
        if not match:
            raise self._unknown()
        results, function, inputs = match.groups()
        return f"{function}({', '.join(part for part in (results, inputs) if part)});"


def _statements(text: str) -> Iterator[re.Match[str]]:
    """Those of one function's body and of its scopes, the closing brace included."""
    depth, end = 1, 0
    while depth:
        piece = _STATEMENT.match(text, end)
        if piece is None:
            raise UnknownPTXError(text[end : end + 100])
        depth += (piece.lastgroup == "open") - (piece.lastgroup == "close")
        end = piece.end()
        yield piece


def _loads_first(statements: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The statements of a straight line of code, loads before what waits for others: as ptxas orders them."""
    waits: dict[str, int] = {}  # register -> how many waits there are before it can be read, or written again
    behind = []
    for _, line in statements:
        registers = re.findall(r"%\w+", line)
        most = max((waits.get(register, 0) for register in registers), default=0)
        behind.append(most)
        filled = set(re.findall(r"%\w+", "".join(_LOADED.findall(line))))
        waits |= {register: most + (register in filled) for register in registers}
    return [statements[i] for i in sorted(range(len(behind)), key=behind.__getitem__)]


def _is_double(name: str) -> bool:
    """Whether an instruction computes in fp64, rather than moving it."""
    return ".f64" in name and name.split(".")[0] not in ("ld", "st", "mov", "selp")


def _parameters(declarations: str) -> Iterator[tuple[str, int]]:
    for kind, name, length in _PARAMETER.findall(declarations):
        yield name, int(length or 1) * _size(kind)


def _size(kind: str) -> int:
    return int(kind[1:]) // 8


def _bits(kind: str, literal: str) -> str:
    """A literal as C++: its bits where they say more than its digits."""
    c_type = C_TYPES[kind]
    if literal[:2] in ("0f", "0d"):
        bits, of = literal[2:], "uint32_t" if literal[1] == "f" else "uint64_t"
        return f"as<{c_type}>({of}(0x{bits}))"
    if kind == "pred":
        return str(bool(int(literal))).lower()
    return f"{c_type}(0x{int(literal) % (1 << 8 * _size(kind)):x}ull)"
