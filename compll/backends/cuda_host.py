# SPDX-License-Identifier: Apache-2.0
"""What the host does for the kernels of a codec: sizes, memory, launches, and what callers see."""

from dataclasses import dataclass

from compll.backends.c_common import Lines, param_names
from compll.backends.cuda_alone import alone_tiles
from compll.backends.cuda_held import Held, host_lines
from compll.backends.cuda_kernels import Kernels, grid_of
from compll.backends.cuda_side import Side
from compll.backends.kept import decode_fails
from compll.backends.layout import LengthExpressions
from compll.ir import nodes
from compll.ir.types import FLOAT, UInt
from compll.ir.walk import free_vars


@dataclass
class Function:
    """One side after its kernels are emitted.

    Attributes:
        is_plain: one pass of decode sums many rows.
        may_note: this is an encode whose decode looks for what is not finite.
        looks_broken: a decode does so, if it is told of some.
        notes_broken: an encode tells it.
        held: the kernel of an encode that keeps tiles.
    """

    side: Side
    lines: Lines
    kernels: Kernels
    is_plain: bool = False
    may_note: bool = False
    looks_broken: bool = False
    notes_broken: bool = False
    held: Held | None = None

    @property
    def has_rest(self) -> bool:
        """Whether a kernel of an encode leaves the residual."""
        return self.kernels.decodes_tiles or self.held is not None

    @property
    def alone_tiles(self) -> int:
        """Up to how many tiles one block of threads does all of a call; 0: never."""
        is_decode = self.side.is_decode
        return alone_tiles(self.kernels.launches, self.lines.text(), is_decode=is_decode)


class Host:
    """Emits the host's side of a codec."""

    def __init__(self, plan: nodes.Plan, lines: Lines) -> None:
        """`lines`: where the kernels stand already."""
        self._plan = plan
        self._program = plan.program
        self._lines = lines

    def emit(self, encode: Function | None, decode: Function | None) -> None:
        """Adds everything from the layout of tensors to the table of the codec."""
        self._tensor()
        if decode is not None and self._program.decode is not None:
            self._check_kernel(self._program.decode)
        for function in (decode, encode):
            if function is not None:
                self._alone(function)
                self._host(function)
        self._scratch(encode, decode)
        self._decode_entry(decode)
        self._encode_entry(encode, decode)
        self._table()

    def _tensor(self) -> None:
        program, lines = self._program, self._lines
        lines.add("// Checks the parameters and lays a tensor out. 0 or a status.")
        lines.add("int32_t prepare(const double* values, int64_t n, Params* params,")
        lines.open("                Tensor<Layout>* tensor) {")
        params = "kParams" if program.params else "nullptr"
        lines.add(
            "const int32_t status = read_params(values, params);",
            "if (status != TF_HIPS_OK) return status;",
            f"const uint32_t hash = codec_hash(0x{self._plan.spec_hash:08X}u, {params}, "
            f"{len(program.params)}, values);",
            "const auto layout_of = [&](int64_t count, Layout* layout) {",
            "  return make_layout(*params, count, layout);",
            "};",
            "return lay_out<Layout>(n, hash, layout_of, tensor);",
        )
        lines.close()
        lines.add("")

    def _host(self, function: Function) -> None:
        """The lengths of loops, and where the vectors of a call lie."""
        kernels, lines, side = function.kernels, self._lines, function.side
        name = "decode" if side.is_decode else "encode"
        count = max(1, len(kernels.loops))
        lines.add(f"// The most elements that each loop of {name} has, for a chunk of n.")
        lines.open(
            f"void measure_{name}([[maybe_unused]] const Params& params, int64_t n, "
            "[[maybe_unused]] int64_t* lengths) {"
        )
        lengths = LengthExpressions(self._program, lines)
        lengths.c.sizes[side.gradient] = "n"
        used = _needed(side, kernels.loops)
        values = [value for _, value, _ in used]
        lengths.unpack_params(set().union(*map(free_vars, [*kernels.loops, *values])))
        for var, value, is_vector in used:
            if is_vector:
                lengths.bound(var, value)
            else:
                lines.add(lengths.c.let(nodes.Let(var, value, var.span)))
        for number, size in enumerate(kernels.loops):
            lines.add(f"lengths[{number}] = {lengths.c(size)};")
        if not kernels.loops:
            lines.add("lengths[0] = n;")
        lines.close()
        lines.add("")
        lines.add("// Gives a call its memory and the sizes of its loops. False: too many tiles.")
        lines.open(f"bool start_{name}(Arena* arena, {name.capitalize()}Call* call) {{")
        lines.add(
            f"using namespace {name}_kernels;",
            f"int64_t full[{count}], last[{count}];",
            "const Tensor<Layout>& tensor = call->tensor;",
            f"measure_{name}(call->params, tensor.elements(0), full);",
            f"measure_{name}(call->params, tensor.last_elements, last);",
        )
        lines.open(f"for (int k = 0; k < {count}; ++k) {{")
        lines.add(
            # A length may shrink as a chunk grows, so the last chunk can have the most tiles.
            "call->tiles[k] = maximum<int64_t>(num_tiles(full[k]), num_tiles(last[k]));",
            "if (call->tiles[k] > kMaxBlocks / tensor.chunks) return false;",
            "call->blocks[k] = (tensor.chunks - 1) * call->tiles[k] + num_tiles(last[k]);",
            "call->run[k] = run_of(call->tiles[k], call->blocks[k]);",
        )
        lines.close()
        tiles = function.alone_tiles
        if tiles:
            lines.add("call->alone = tensor.chunks == 1 && TF_HIPS_MAY_BE_ALONE ? kSteps : 0;")
            lines.open(f"for (int k = 0; k < {count}; ++k) {{")
            lines.add(f"if (call->tiles[k] > {tiles}) call->alone = 0;")
            lines.close()
        lines.add("call->scalars = arena->take<Scalars>(tensor.chunks);")
        for kind, member, room in kernels.arrays:
            text = room.replace("call.", "call->")
            lines.add(
                f"call->{member}_room = {text};",
                f"call->{member} = arena->take<{kind}>(tensor.chunks * call->{member}_room);",
            )
        lines.add("return true;")
        lines.close()
        lines.add("")
        lines.add("// Launches the kernels, one after another.")
        lines.open(
            f"void run_{name}([[maybe_unused]] const {name.capitalize()}Call& call, "
            "cudaStream_t stream) {"
        )
        lines.add(f"using namespace {name}_kernels;")
        if function.alone_tiles:
            lines.open("if (call.alone != 0) {")
            lines.add(f"TF_HIPS_LAUNCH({name}_alone, 1, kThreads, stream, call);", "return;")
            lines.close()
        lines.add(*(launch.grid for launch in kernels.launches if launch.grid))
        lines.close()
        lines.add("")
        if function.held is not None:
            lines.add(*host_lines(kernels, function.held), "")

    def _alone(self, function: Function) -> None:
        """The kernel in which one block of threads does all of a small call."""
        if not function.alone_tiles:
            return
        lines, is_decode = self._lines, function.side.is_decode
        name = "decode" if is_decode else "encode"
        lines.add("// All kernels of a small call, by one block of threads.")
        lines.open(f"TF_HIPS_KERNEL {name}_alone(const {name.capitalize()}Call call) {{")
        lines.add(f"using namespace {name}_kernels;")
        if function.kernels.keeps:
            lines.add("#ifdef __CUDA_ARCH__", "__builtin_assume(call.alone != 0);", "#endif")
        if is_decode:
            lines.open("if (call.alone != kSteps) {")
            lines.add("TF_HIPS_PHASE(t) {", "  if (t == 0) *call.report = TF_HIPS_CUDA_FINE;", "}")
            lines.close()
            lines.add("if (call.alone == kAll) check_packets(call, 0);")
        lines.add(*(launch.alone for launch in function.kernels.launches if launch.alone))
        lines.close()
        lines.add("")

    def _scratch(self, encode: Function | None, decode: Function | None) -> None:
        lines = self._lines
        lines.open("int64_t wire_bytes(const double* values, int64_t n) {")
        lines.add(
            "const ScopedExactDenormals exact;",
            "Params params;",
            "Tensor<Layout> tensor;",
            "const int32_t status = prepare(values, n, &params, &tensor);",
            "return status == TF_HIPS_OK ? tensor.total : -status;",
        )
        lines.close()
        lines.add("")
        lines.open("int64_t scratch_bytes(const double* values, int64_t n) {")
        lines.add(
            "const ScopedExactDenormals exact;",
            "Params params;",
            "Tensor<Layout> tensor;",
            "const int32_t status = prepare(values, n, &params, &tensor);",
            "if (status != TF_HIPS_OK) return -status;",
            "int64_t most = 0;",
        )
        for function in (encode, decode):
            if function is None:
                continue
            name = "decode" if function.side.is_decode else "encode"
            lines.open("{")
            lines.add(
                "Arena arena(nullptr);",
                "arena.take<Report>(2);",
                f"{name.capitalize()}Call call = {{}};",
                "call.params = params;",
                "call.tensor = tensor;",
                f"if (!start_{name}(&arena, &call)) return -TF_HIPS_BAD_PARAMETER;",
                "if (arena.used() > most) most = arena.used();",
            )
            lines.close()
        lines.add("return most;")
        lines.close()
        lines.add("")

    def _start(self, name: str, *, has_tensor: bool = False) -> None:
        """Declares `call`, `arena`, `own` and `stream`."""
        lines = self._lines
        lines.add(f"{name.capitalize()}Call call = {{}};")
        if not has_tensor:
            lines.add(
                "const int32_t status = prepare(values, n, &call.params, &call.tensor);",
                "if (status != TF_HIPS_OK) return status;",
            )
        lines.add(
            "Arena arena(scratch);",
            "Report* const own = arena.take<Report>(2);",
            f"if (!start_{name}(&arena, &call)) return TF_HIPS_BAD_PARAMETER;",
            "if (scratch == nullptr || arena.used() > room) return TF_HIPS_BUFFER_TOO_SMALL;",
            "const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);",
        )

    def _decode_entry(self, function: Function | None) -> None:
        lines, program = self._lines, self._program
        head = (
            "int32_t decode(const double* values, const uint8_t* const* packets, int64_t bytes,",
            "               int32_t num, float* out, int64_t n, int32_t mode, uint64_t* report,",
            "               void* scratch, int64_t room, void* stream_pointer) {",
        )
        if function is None or program.decode is None:
            lines.add("// The specification has no Decode.")
            lines.add(
                "int32_t decode(const double*, const uint8_t* const*, int64_t, int32_t, float*, "
                "int64_t,"
            )
            lines.open("               int32_t, uint64_t*, void*, int64_t, void*) {")
            lines.add("return TF_HIPS_NOT_PROVIDED;")
            lines.close()
            lines.add("")
            return
        lines.add("// Adds up rows; `own`: packets that encode has just made, which are in order.")
        lines.add("void add_rows(DecodeCall call, const uint8_t* const* all, int32_t num,")
        lines.open("              int32_t mode, bool is_own, cudaStream_t stream) {")
        lines.open("const auto take = [&](int32_t first, int32_t most) {")
        lines.add(
            "call.rows.first = first;",
            "call.rows.num = num - first < most ? num - first : most;",
            "for (int32_t k = 0; k < call.rows.num; ++k) call.rows.row[k] = all[first + k];",
            "call.mode = first == 0 ? mode : static_cast<int32_t>(TF_HIPS_ADD);",
        )
        lines.close("};")
        step = "kMaxRows" if function.is_plain else "1"
        if function.alone_tiles:
            lines.open(f"if (call.alone != 0 && num <= {step}) {{")
            lines.add(
                "call.alone = is_own ? kOwn : kAll;",
                f"take(0, {step});",
                "run_decode(call, stream);",
                "return;",
            )
            lines.close()
        lines.add(
            "const bool is_few =",
            "    is_own || (num <= kMaxRows && call.tensor.chunks * num <= kThreads);",
        )
        lines.open("if (is_few) {")
        lines.add(
            "take(0, kMaxRows);",
            "if (is_own) call.rows.num = 0;  // nothing to check: only the report is made",
            "TF_HIPS_FOLLOW(check_few_grid, 1, kThreads, stream, call);",
        )
        lines.turn("} else {")
        lines.add("cudaMemsetAsync(call.report, 0xFF, sizeof(Report), stream);")
        lines.close()
        lines.open("for (int32_t first = 0; first < num && !is_few; first += kMaxRows) {")
        lines.add(
            "take(first, kMaxRows);",
            "const int64_t pairs = call.tensor.chunks * call.rows.num;",
            "const int64_t groups = (pairs + kThreads - 1) / kThreads;",
            "TF_HIPS_FOLLOW(check_packets_grid, groups, kThreads, stream, call);",
        )
        lines.close()
        lines.open(f"for (int32_t first = 0; first < num; first += {step}) {{")
        lines.add(
            f"take(first, {step});",
            "call.is_just_checked = is_few && first == 0;",
            "run_decode(call, stream);",
        )
        lines.close()
        lines.close()
        lines.add("", *head[:-1])
        lines.open(head[-1])
        lines.add("const ScopedExactDenormals exact;")
        self._start("decode")
        lines.add(
            "static_cast<void>(own);",
            "const bool is_mode = mode == TF_HIPS_SET || mode == TF_HIPS_ADD ||",
            "                     (mode == TF_HIPS_RESIDUAL && num == 1);",
            "if (!is_mode || num < 1 || num > TF_HIPS_CUDA_MAX_ROWS || packets == nullptr ||",
            "    report == nullptr || (out == nullptr && n > 0)) {",
            "  return TF_HIPS_BAD_ARGUMENT;",
            "}",
            "if (bytes != call.tensor.total) {",
            "  return bytes < call.tensor.total ? TF_HIPS_TRUNCATED : TF_HIPS_TOO_LONG;",
            "}",
            "call.out = out;",
            "call.report = reinterpret_cast<Report*>(report);",
            "add_rows(call, packets, num, mode, false, stream);",
            "return launched();",
        )
        lines.close()
        lines.add("")

    @staticmethod
    def _philox(function: Function) -> list[str]:
        """Statements that make the keys of a call's noise, which each thread would make again."""
        sites = range(function.side.sites)
        return [f"call.philox[{site}] = philox_keys(*key, {site});" for site in sites]

    def _check_kernel(self, decode: nodes.Decode) -> None:
        lines, names = self._lines, param_names(self._program)
        lines.add("// A thread a packet of a chunk: what can be told of it before it is decoded.")
        lines.open("TF_HIPS_BLOCK check_packets(const DecodeCall& call, uint32_t block_index) {")
        lines.open("TF_HIPS_PHASE(t) {")
        lines.add(
            "const uint32_t chunks = static_cast<uint32_t>(call.tensor.chunks);",
            "const uint32_t pair = block_index * kThreads + t;",
            "const int32_t row = static_cast<int32_t>(pair / chunks);",
            "const int32_t chunk = static_cast<int32_t>(pair % chunks);",
        )
        lines.open("if (row < call.rows.num) {")
        lines.add(
            "const uint8_t* const packet = call.rows.row[row] + chunk * call.tensor.stride;",
            "[[maybe_unused]] const uint8_t* const body = packet + kPrefixBytes;",
            "[[maybe_unused]] const Layout& layout = call.tensor.layout(chunk);",
            "int32_t status = check_prefix(call.tensor.hash, call.tensor.elements(chunk), packet);",
        )
        for number, item in enumerate(decode.fields):
            if item.equals is None:
                continue
            kind = item.var.type
            bits = kind.bits if isinstance(kind, UInt) else 32
            at = f"body + layout.offset[{number}]"
            load = f"load_float({at})" if kind == FLOAT else f"load_code({at}, {bits})"
            lines.add(
                f"if (status == TF_HIPS_OK && !({load} == call.params.{names[item.equals]})) {{",
                "  status = TF_HIPS_BODY_CONTRADICTS_PARAMS;",
                "}",
            )
        lines.add(
            "if (status != TF_HIPS_OK) complain(call.report, call.rows.first + row, chunk, status);"
        )
        for _ in range(3):
            lines.close()
        lines.add(*grid_of("check_packets", "DecodeCall"))
        lines.add("// All packets by one block of threads, which makes the report, too.")
        lines.open("TF_HIPS_KERNEL check_few_grid(const DecodeCall call) {")
        lines.add("follow();")
        lines.open("TF_HIPS_PHASE(t) {")
        lines.add("if (t == 0) *call.report = TF_HIPS_CUDA_FINE;")
        lines.close()
        lines.add("check_packets(call, 0);")
        lines.close()
        lines.add("")

    def _encode_entry(self, function: Function | None, decode: Function | None) -> None:
        lines = self._lines
        if function is None:
            lines.add("// The specification has no Encode.")
            lines.add(
                "int32_t encode(const double*, const TfHipsKey*, const float*, const float*, "
                "float*,"
            )
            lines.open(
                "               uint64_t*, int64_t, uint8_t*, int64_t, void*, int64_t, void*) {"
            )
            lines.add("return TF_HIPS_NOT_PROVIDED;")
            lines.close()
            lines.add("")
            return
        if function.side.states:
            self._state_entries(function)
            return
        lines.add(
            "int32_t encode(const double* values, const TfHipsKey* key, const float* gradient,",
            "               const float* residual, float* new_residual, uint64_t* report,",
            "               int64_t n, uint8_t* packets, int64_t capacity, void* scratch,",
        )
        lines.open("               int64_t room, void* stream_pointer) {")
        lines.add("const ScopedExactDenormals exact;")
        if decode is None:
            lines.add("if (residual != nullptr) return TF_HIPS_NOT_PROVIDED;")
        self._start("encode")
        lines.add(
            "if (key == nullptr || packets == nullptr || (gradient == nullptr && n > 0) ||",
            "    (residual != nullptr && new_residual == nullptr)) {",
            "  return TF_HIPS_BAD_ARGUMENT;",
            "}",
            "if (capacity < call.tensor.total) return TF_HIPS_BUFFER_TOO_SMALL;",
            "call.key = *key;",
            *self._philox(function),
            "call.packets = packets;",
            "call.gradient = gradient;",
            "call.residual = residual;",
            "call.value = new_residual;",
            "call.in = residual == nullptr ? gradient : new_residual;",
        )
        reads_again = decode is not None and not function.kernels.decodes_tiles
        if reads_again:
            # Before anything is launched: what is wrong with the arguments is said without.
            lines.add(
                "// What is left: the packets are read again, in the same memory.",
                "DecodeCall rest = {};",
            )
            lines.open("if (residual != nullptr) {")
            lines.add(
                "rest.params = call.params;",
                "rest.tensor = call.tensor;",
                "rest.out = new_residual;",
                "rest.report = report == nullptr ? own : reinterpret_cast<Report*>(report);",
                "Arena again(scratch);",
                "again.take<Report>(2);",
                "if (!start_decode(&again, &rest)) return TF_HIPS_BAD_PARAMETER;",
                "if (again.used() > room) return TF_HIPS_BUFFER_TOO_SMALL;",
            )
            lines.close()
        else:
            lines.add("static_cast<void>(own);")
        # Which kernel forms the sum, and so whether it tells of what is not finite.
        is_apart = not function.kernels.takes_sum
        notes = decode is not None and decode.looks_broken and (is_apart or function.notes_broken)
        if notes:
            lines.add("int32_t* const broken = reinterpret_cast<int32_t*>(own + 1);")
            lines.open("if (residual != nullptr && call.alone == 0) {")
            lines.add(
                "rest.broken = broken;",
                "TF_HIPS_FOLLOW(clear_flag, 1, kThreads, stream, broken);",
            )
            lines.close()
        if function.notes_broken:
            lines.add("call.broken = broken;")
        if is_apart:
            name, more = ("add_all_noting", ", broken") if notes else ("add_all", "")
            lines.open("if (residual != nullptr) {")
            lines.add(
                f"TF_HIPS_FOLLOW({name}, num_tiles(n), kThreads, stream, gradient, residual,",
                f"               new_residual, n{more});",
            )
            lines.close()
        if function.has_rest:
            lines.add(
                "call.rest.params = call.params;",
                "call.rest.tensor = call.tensor;",
                "call.rest.rows.row[0] = packets;",
                "call.rest.rows.num = 1;",
                "call.rest.out = new_residual;",
                "call.rest.mode = TF_HIPS_RESIDUAL;",
            )
        all_fine = "if (report != nullptr) cudaMemsetAsync(report, 0xFF, sizeof(Report), stream);"
        if function.held is not None:
            lines.open("if (hold_encode(call, stream)) {")
            lines.add(all_fine, "return launched();")
            lines.close()
        lines.add("run_encode(call, stream);")
        if reads_again:
            lines.open("if (residual != nullptr) {")
            lines.add(
                "const uint8_t* const made = packets;",
                "add_rows(rest, &made, 1, TF_HIPS_RESIDUAL, true, stream);",
                "return launched();",
            )
            lines.close()
        lines.add(all_fine, "return launched();")
        lines.close()
        lines.add("")

    def _state_entries(self, function: Function) -> None:
        """What encodes, of a codec with state."""
        lines, number = self._lines, len(function.side.states)
        lines.add(
            "int32_t encode(const double*, const TfHipsKey*, const float*, const float*, float*,"
        )
        lines.open("               uint64_t*, int64_t, uint8_t*, int64_t, void*, int64_t, void*) {")
        lines.add("return TF_HIPS_NEEDS_STATE;")
        lines.close()
        lines.add(
            "",
            "int32_t encode_state(const double* values, const TfHipsKey* key, "
            "const float* gradient,",
            "                     const float* state, float* new_state, int64_t n, "
            "uint8_t* packets,",
        )
        lines.open(
            "                     int64_t capacity, void* scratch, int64_t room, "
            "void* stream_pointer) {"
        )
        lines.add("const ScopedExactDenormals exact;")
        self._start("encode")
        lines.add(
            "static_cast<void>(own);",
            "if (key == nullptr || packets == nullptr ||",
            "    (n > 0 && (gradient == nullptr || state == nullptr || new_state == nullptr))) {",
            "  return TF_HIPS_BAD_ARGUMENT;",
            "}",
            "if (capacity < call.tensor.total) return TF_HIPS_BUFFER_TOO_SMALL;",
            "call.key = *key;",
            *self._philox(function),
            "call.packets = packets;",
            "call.in = call.gradient = gradient;",
        )
        lines.open(f"for (int k = 0; k < {number}; ++k) {{")
        lines.add("call.state[k] = state + k * n;", "call.new_state[k] = new_state + k * n;")
        lines.close()
        lines.add("run_encode(call, stream);", "return launched();")
        lines.close()
        lines.add("")

    def _table(self) -> None:
        program, lines = self._program, self._lines
        names = program.state_names
        if names:
            quoted = ", ".join(f'"{name}"' for name in names)
            lines.add(f"const char* const kStates[] = {{{quoted}}};", "")
        lines.open("const TfHipsCudaCodec kCodec = {")
        lines.add(
            "TF_HIPS_CUDA_ABI_VERSION,",
            f'"{program.name}",',
            f"0x{self._plan.spec_hash:08X}u,",
            f"{len(program.params)},",
            f"{'kParams' if program.params else 'nullptr'},",
            "wire_bytes,",
            "scratch_bytes,",
            "encode,",
            "decode,",
            f"{len(names)},",
            "kStates," if names else "nullptr,  // state_names",
            "encode_state," if names else "nullptr,  // encode_state",
            "error_text,",
            f"{int(decode_fails(self._plan))},  // own_may_fail",
        )
        lines.close("};")
        lines.add(
            "",
            "}  // namespace",
            f"}}  // namespace tf_hips::cuda::codec_{program.name}",
            "",
            'extern "C" __attribute__((visibility("default")))',
            f"const TfHipsCudaCodec* tf_hips_cuda_codec_{program.name}(void) {{",
            f"  return &tf_hips::cuda::codec_{program.name}::kCodec;",
            "}",
        )


def _needed(side: Side, sizes: list[nodes.Expr]) -> list[tuple[nodes.Var, nodes.Expr, bool]]:
    """What lengths are made of, in order: scalars, and vectors with their largest length."""
    made = [(item.var, item.size, True) for item in side.fields]
    made += [(item.var, item.value, False) for item in side.definitions if item.form == "let"]
    kept = {item.var: item.most for item in side.definitions if item.form == "kept"}
    order = [item.var for item in side.fields] + [item.var for item in side.definitions]
    made += [(var, most, True) for var, most in kept.items()]
    need: set[nodes.Var] = set().union(*map(free_vars, sizes)) if sizes else set()
    used: list[tuple[nodes.Var, nodes.Expr, bool]] = []
    for var, value, is_vector in sorted(made, key=lambda item: order.index(item[0]), reverse=True):
        if var in need and value is not None:
            used.insert(0, (var, value, is_vector))
            need |= free_vars(value)
    return used
