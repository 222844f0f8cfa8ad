# SPDX-License-Identifier: Apache-2.0
"""The functions of a codec that callers see, and the table of them (tf_hips/cc/runtime/codec.h)."""

from compll.backends.c_common import Lines, param_names
from compll.backends.feedback import has_feedback, has_merge, has_ranges, returns_status
from compll.backends.in_place import is_in_place
from compll.backends.kept import decode_fails
from compll.backends.rooms import rooms
from compll.backends.rows import NAMES
from compll.ir import nodes
from compll.ir.types import FLOAT, UInt

# A call of a hot function.
_ENCODE = "{name}(params, *key, in, nullptr, nullptr, n, layout, body{state})"


def emit(plan: nodes.Plan, lines: Lines, *, rows: tuple[int, ...]) -> None:
    """Adds the entry points of a codec whose hot functions are there.

    `rows`: how many bodies at a time they decode, too (rows.py).
    """
    _Entries(plan, lines, rows=rows).run()


class _Entries:
    def __init__(self, plan: nodes.Plan, lines: Lines, *, rows: tuple[int, ...]) -> None:
        self._rows = rows
        self._plan = plan
        self._program = plan.program
        self._lines = lines

    def run(self) -> None:
        program, lines = self._program, self._lines
        lines.open("int64_t max_body_bytes(const double* values, int64_t n) {")
        lines.add("const ScopedExactDenormals exact;")
        self._start("-status")
        lines.add("return layout.bytes;")
        lines.close()
        lines.add("")
        head = (
            "int64_t encode(const double* values, const TfHipsKey* key, const float* in, int64_t n,"
        )
        tail = "               uint8_t* body, int64_t capacity) {"
        if program.encode is None:
            lines.add("// The specification has no Encode.")
            lines.add(
                "int64_t encode(const double*, const TfHipsKey*, const float*, int64_t, uint8_t*,"
            )
            lines.open("               int64_t) {")
            lines.add("return -TF_HIPS_NOT_PROVIDED;")
        elif program.state_names:
            lines.add("// The specification has state: encode_state encodes.")
            lines.add(
                "int64_t encode(const double*, const TfHipsKey*, const float*, int64_t, uint8_t*,"
            )
            lines.open("               int64_t) {")
            lines.add("return -TF_HIPS_NEEDS_STATE;")
            lines.close()
            lines.add("")
            lines.add(
                "int64_t encode_state(const double* values, const TfHipsKey* key, const float* in,",
                "                     const float* const* state, float* const* new_state,",
            )
            lines.open("                     int64_t n, uint8_t* body, int64_t capacity) {")
            self._state_body()
        else:
            lines.add(head)
            lines.open(tail)
            self._start_encode()
            self._call(_ENCODE.format(name="encode_fields", state=""))
            lines.add("return layout.bytes;")
        lines.close()
        lines.add("")
        if has_feedback(self._plan):
            lines.add(
                "int64_t encode_feedback(const double* values, const TfHipsKey* key,",
                "                        const float* gradient, const float* residual,",
                "                        float* new_residual, int64_t n, uint8_t* body,",
            )
            lines.open("                        int64_t capacity) {")
            lines.add("const ScopedExactDenormals exact;")
            self._start("-status")
            lines.add("if (capacity < layout.bytes) return -TF_HIPS_BUFFER_TOO_SMALL;")
            if rooms(self._plan):
                lines.add("if (!reserve(params, n)) return -TF_HIPS_NO_SCRATCH;")
            self._feedback_body()
            lines.close()
            lines.add("")
        self._decode_entries(program)
        if program.state_names:
            names = ", ".join(f'"{name}"' for name in program.state_names)
            lines.add(f"const char* const kStates[] = {{{names}}};", "")
        decode = program.decode
        is_sparse = decode is not None and isinstance(decode.result, nodes.Scatter)
        lines.open("const TfHipsCodec kCodec = {")
        params = "kParams" if program.params else "nullptr"
        lines.add(
            "TF_HIPS_ABI_VERSION,",
            f'"{program.name}",',
            f"0x{self._plan.spec_hash:08X}u,",
            f"{len(program.params)},",
            f"{params},",
            "1,  // is_fixed_size",
            f"{int(is_sparse)},  // is_sparse",
            "max_body_bytes,",
            "encode,",
            "decode,",
            "encode_feedback," if has_feedback(self._plan) else "nullptr,  // encode_feedback",
            "merge," if has_merge(self._plan) else "nullptr,  // merge",
            f"{len(program.state_names)},  // num_states",
            "kStates," if program.state_names else "nullptr,",
            "encode_state," if program.state_names else "nullptr,  // encode_state",
        )
        lines.close("};")
        lines.add("", "}  // namespace", f"}}  // namespace tf_hips::codec_{program.name}", "")
        getter = f"tf_hips_codec_{program.name}"
        lines.add(
            'extern "C" __attribute__((visibility("default")))',
            f"const TfHipsCodec* {getter}(void) {{",
        )
        lines.add(f"  return &tf_hips::codec_{program.name}::kCodec;", "}", "")
        lines.add(f"TF_HIPS_REGISTER_CODEC({getter});")

    def _start_encode(self) -> None:
        self._lines.add("const ScopedExactDenormals exact;")
        self._start("-status")
        self._lines.add("if (capacity < layout.bytes) return -TF_HIPS_BUFFER_TOO_SMALL;")

    def _state_body(self) -> None:
        """An encode whose new state may be where the old one is."""
        lines = self._lines
        self._start_encode()
        lines.add("const bool is_in_place = state[0] == new_state[0];")
        if is_in_place(self._plan):
            lines.open("if (is_in_place) {")
            self._call(_ENCODE.format(name="in_place_fields", state=", state, new_state"))
            lines.add("return layout.bytes;")
            lines.close()
            self._call(_ENCODE.format(name="encode_fields", state=", state, new_state"))
            lines.add("return layout.bytes;")
            return
        num = len(self._program.state_names)
        lines.add(
            "// Loops read the old state behind those that write the new one: they read a copy.",
            f"const float* old[{num}];",
        )
        for i in range(num):
            lines.add(
                f"old[{i}] = keep_state<{i}>(state[{i}], is_in_place ? n : 0);",
                f"if (old[{i}] == nullptr) return -TF_HIPS_NO_SCRATCH;",
            )
        call = _ENCODE.format(name="encode_fields", state=", is_in_place ? old : state, new_state")
        if not returns_status(self._plan):
            lines.add(f"{call};", "return layout.bytes;")
            return
        lines.add(
            f"status = {call};",
            "if (status == TF_HIPS_OK) return layout.bytes;",
            f"for (int32_t i = 0; is_in_place && i < {num}; ++i) {{",
            "  std::copy(old[i], old[i] + n, new_state[i]);",
            "}",
            "return -status;",
        )

    def _feedback_body(self) -> None:
        """An encode with feedback; where it refuses its own packet, the residual is what it was."""
        lines = self._lines
        call = "feedback_fields(params, *key, gradient, residual, new_residual, n, layout, body)"
        if not decode_fails(self._plan):
            self._call(call)
            lines.add("return layout.bytes;")
            return
        # To keep a copy of the old one would cost a sparse codec half of its time, or more.
        lines.add(
            f"status = {call};",
            "if (status == TF_HIPS_OK) return layout.bytes;",
            "// Decoding refuses what was encoded: new_residual is still the sum.",
            "residual_tile(gradient, n, new_residual);",
            "return -status;",
        )

    def _call(self, text: str) -> None:
        """Calls a hot function of the encoder."""
        if returns_status(self._plan):
            self._lines.add(f"status = {text};", "if (status != TF_HIPS_OK) return -status;")
        else:
            self._lines.add(f"{text};")

    def _decode_entries(self, program: nodes.Program) -> None:
        lines = self._lines
        if program.decode is None:
            lines.add("// The specification has no Decode.")
            lines.open(
                "int32_t decode(const double*, const uint8_t*, int64_t, float*, int64_t, int32_t) {"
            )
            lines.add("return TF_HIPS_NOT_PROVIDED;")
            lines.close()
            lines.add("")
            return
        lines.add("// What can be wrong with a body.")
        lines.add("int32_t check_body([[maybe_unused]] const Params& params, const Layout& layout,")
        lines.open("                   [[maybe_unused]] const uint8_t* body, int64_t bytes) {")
        lines.add("if (bytes != layout.bytes) return TF_HIPS_BODY_LENGTH;")
        self._check_equals(program.decode)
        lines.add("return TF_HIPS_OK;")
        lines.close()
        lines.add("")
        lines.add("int32_t decode(const double* values, const uint8_t* body, int64_t bytes,")
        lines.open("               float* out, int64_t n, int32_t mode) {")
        lines.add("const ScopedExactDenormals exact;")
        self._start("status")
        call = "decode_fields(params, body, layout, out, n, mode, 0, n);"
        lines.add(
            "status = check_body(params, layout, body, bytes);",
            "if (status != TF_HIPS_OK) return status;",
            f"{'status = ' if decode_fails(self._plan) else ''}{call}",
            "if (mode == TF_HIPS_STREAM) stream_end();",
            f"return {'status' if decode_fails(self._plan) else 'TF_HIPS_OK'};",
        )
        lines.close()
        lines.add("")
        if has_merge(self._plan):
            self._merge_entry()

    def _merge_entry(self) -> None:
        lines = self._lines
        # Of whole bodies one after another only ranges could go past the caches.
        maybe = "" if has_ranges(self._plan) else "[[maybe_unused]] "
        lines.add(
            "int32_t merge(const double* values, const uint8_t* const* bodies,",
            "              const int64_t* bytes, int32_t num, float* out, int64_t n, "
            f"{maybe}int32_t mode,",
        )
        lines.open("              int32_t* bad_row) {")
        lines.add("const ScopedExactDenormals exact;", "*bad_row = -1;")
        self._start("status")
        lines.open("for (int32_t row = 0; row < num; ++row) {")
        lines.add(
            "status = check_body(params, layout, bodies[row], bytes[row]);",
            "if (status == TF_HIPS_OK) continue;",
            "*bad_row = row;",
            "return status;",
        )
        lines.close()
        lines.add(
            "const auto one = [&](int32_t row, float* to, int32_t how, int64_t begin,",
            "                     int64_t end) {",
            "  decode_fields(params, bodies[row], layout, to, n, how, begin, end);",
            "};",
        )
        if self._rows:
            several = dict(zip(self._rows, ("more", "most"), strict=False))
            for count, name in several.items():
                call = f"  {NAMES[count]}("
                lines.add(
                    f"const auto {name} = [&](int32_t row, float* to, int64_t begin, int64_t end,",
                    "                      float* late) {",
                    f"{call}params, bodies + row, layout, to, n, row == 0, begin, end,",
                    f"{' ' * len(call)}late);",
                    "};",
                )
            counts = f"{self._rows[0]}, {self._rows[-1]}"
            calls = f"more, {several[self._rows[-1]]}"
            lines.add(f"merge_ranges<{counts}>(num, n, mode, out, one, {calls});")
        elif has_ranges(self._plan):
            lines.add("merge_ranges(num, n, mode, out, one);")
        else:
            lines.add("merge_rows(num, n, out, one);")
        lines.add("return TF_HIPS_OK;")
        lines.close()
        lines.add("")

    def _start(self, failure: str) -> None:
        self._lines.add(
            "Params params;",
            "int32_t status = read_params(values, &params);",
            f"if (status != TF_HIPS_OK) return {failure};",
            "Layout layout;",
            "status = make_layout(params, n, &layout);",
            f"if (status != TF_HIPS_OK) return {failure};",
        )

    def _check_equals(self, decode: nodes.Decode) -> None:
        names = param_names(self._program)
        for number, item in enumerate(decode.fields):
            if item.equals is None:
                continue
            kind = item.var.type
            bits = kind.bits if isinstance(kind, UInt) else 32
            load = "load_float(" if kind == FLOAT else "load_code("
            end = ")" if kind == FLOAT else f", {bits})"
            text = f"{load}body + layout.offset[{number}]{end}"
            self._lines.add(
                f"if (!({text} == params.{names[item.equals]})) {{",
                "  return TF_HIPS_BODY_CONTRADICTS_PARAMS;",
                "}",
            )
