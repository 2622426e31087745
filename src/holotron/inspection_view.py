"""An inspection on a terminal: the layer map, the parts, memory, screens, files, and what is unverified."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from holotron.inspection import Inspection
from holotron.model.config import LAYER_KINDS
from holotron.model.sizes import Sizes, SsmBits

# Letters stay readable where there are no colours.
STYLES = {"M": "white on blue", "*": "black on yellow", "-": "white on grey37", "E": "black on green"}
LABELS = {"mamba": "Mamba-2", "attention": "attention", "mlp": "MLP", "moe": "experts (MoE)"}
PARTS = {
    "embeddings": "embeddings",
    "lm_head": "LM head",
    "mamba": "Mamba-2",
    "attention": "attention",
    "mlp": "MLP",
    "experts_routed": "routed experts",
    "experts_shared": "shared experts",
    "experts_latent": "latent projections",
    "router": "routers",
    "norms": "norms",
    "vision": "vision tower",
    "projector": "projector",
    "grounding_head": "grounding head",
}
CONTEXTS = (8192, 16384, 32768, 65536, 131072)
_LISTED = 8
_MIB = 2**20


def show(found: Inspection, baseline: Inspection | None, console: Console) -> None:
    """Print everything; lines fit the console's width."""
    console.print(Text.assemble((found.name, "bold"), (f"  {found.architecture}", "dim")))
    for line in (found.description, found.source):
        if line:
            console.print(Text(line), soft_wrap=found.kind != "preset")
    console.print()
    console.print(layer_map(found.sizes.layers, console.width))
    _section(console, "Parameters", _parts(found.sizes))
    _section(console, "Memory", _memory(found.sizes))
    if baseline is not None:
        _section(console, f"Memory of one sequence, beside {baseline.name}", _contexts(found.sizes, baseline.sizes))
        console.print(Padding(Text(break_even_line(found, baseline)), (0, 2), expand=False))
    if found.screens:
        _section(console, "Image tokens of a screenshot", _screens(found, baseline))
        console.print(Text("  Without delimiters. Scale: pixels the model sees per screen pixel.", "dim"))
    if found.kind != "preset":
        _section(console, "Files", _files(found))
    if found.unverified:
        how = " (inferred, not read from the released files)" if found.kind == "preset" else ""
        table = _grid("left", "left")
        for line in found.unverified:
            table.add_row("-", Text(line))
        _section(console, f"Unverified{how}", table)


def layer_map(pattern: str, width: int) -> Text:
    """The layers in order as one strip of letters, rows headed by the index of their first layer, and a legend."""
    margin = len(str(len(pattern))) + 1
    row = max(width - margin, 1)
    row = row // 10 * 10 or row
    text = Text()
    for start in range(0, len(pattern), row):
        text.append(f"{start:>{margin - 1}} ", "dim")
        for letter in pattern[start : start + row]:
            text.append(letter, STYLES[letter])
        text.append("\n")
    legend = Text(" " * margin)
    for letter, kind in LAYER_KINDS.items():
        if letter in pattern:
            entry = Text("   " if len(legend) > margin else "")
            entry.append(f" {letter} ", STYLES[letter])
            entry.append(f" {pattern.count(letter)} {LABELS[kind]}")
            legend.append_text(entry)
    legend.append(f"   = {len(pattern)} layers")
    return text.append_text(legend)


def break_even_line(found: Inspection, baseline: Inspection) -> str:
    """From which context on the hybrid's fixed state has paid for itself, in words."""
    wide, narrow = found.sizes.break_even(baseline.sizes), found.sizes.break_even(baseline.sizes, 16)
    if wide is None or narrow is None:
        return f"At no length does a sequence take less memory than with {baseline.name}: its tokens cost as much."
    if wide == 0:
        return f"A sequence never takes more memory than with {baseline.name}."
    shots, own = _in_screenshots(wide, found), ""
    if found.sizes.kv_bytes_per_token:
        own = f" One state weighs as much as {found.sizes.state_bytes_fp32 // found.sizes.kv_bytes_per_token:,} "
        own += "tokens of its own KV cache."
    unit = "tokens" if wide > 1 else "token"
    return (
        f"Break-even: from {wide:,} {unit} on ({narrow:,} with a 16-bit state{shots}) a sequence takes less memory "
        f"than with {baseline.name}; below that the fixed state costs more than it saves.{own}"
    )


def _in_screenshots(tokens: int, found: Inspection) -> str:
    shot = {screen.name: screen.tokens for screen in found.screens}.get("1280x720")
    if not shot:
        return ""
    count = tokens / shot
    return ", less than a screenshot of 1280x720" if count < 1 else f", {count:.1f} screenshots of 1280x720"


def _section(console: Console, title: str, table: Table) -> None:
    console.print(Text(f"\n{title}", "bold"))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _grid(*justify: str) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for side in justify:
        table.add_column(justify=side, no_wrap=side == "right")  # type: ignore[arg-type]
    return table


def _parts(sizes: Sizes) -> Table:
    table = _grid("left", "right", "right", "left")
    for part, count in sizes.parts.items():
        share = count / sizes.parameters
        percent = f"{share:.1%}" if share >= 0.0005 else "<0.1%"
        table.add_row(PARTS[part], billions(count), percent, Text("█" * round(share * 24), "cyan"))
    table.add_row(Text("all", "bold"), Text(billions(sizes.parameters), "bold"), "", "")
    if sizes.active_parameters < sizes.parameters:
        table.add_row("active per text token", billions(sizes.active_parameters), "", "")
    return table


def _memory(sizes: Sizes) -> Table:
    table = _grid("left", "right", "left")
    extra = f"+{size(2 * sizes.kept_fp32)} for what stays fp32" if sizes.kept_fp32 else ""
    table.add_row("weights, bf16", size(sizes.weight_bytes_bf16), extra)
    table.add_row("KV cache per token", f"{sizes.kv_bytes_per_token:,} B", "bf16")
    if not sizes.state_bytes_fp32:
        table.add_row("state per sequence", "0 B", "attention only")
        return table
    widths: tuple[tuple[SsmBits, str], ...] = ((32, "fp32"), (16, "16-bit"))
    for bits, name in widths:
        count, block = sizes.state_bytes(bits), sizes.vllm_block_tokens(bits)
        note = (f"{count / _MIB:.1f} MiB" if count >= _MIB else f"{count / 1024:.1f} KiB") + (
            f"; vLLM block {block:,} tokens" if block else ""
        )
        table.add_row(f"state per sequence, {name}", f"{count:,} B", note)
    return table


def _contexts(sizes: Sizes, baseline: Sizes) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    states = ("fp32 state", "16-bit state") if sizes.state_bytes_fp32 else ("this",)
    for header in ("context", *states, "baseline", "baseline / this"):
        table.add_column(header, justify="right")
    for tokens in CONTEXTS:
        own = [sizes.sequence_bytes(tokens), sizes.sequence_bytes(tokens, 16)][: len(states)]
        other = baseline.sequence_bytes(tokens)
        ratio = f"{other / own[0]:.1f}x" if own[0] else "-"
        table.add_row(f"{tokens // 1024}k", *(f"{count / _MIB:,.0f} MiB" for count in (*own, other)), ratio)
    return table


def _screens(found: Inspection, baseline: Inspection | None) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    others = {screen.name: screen.tokens for screen in baseline.screens} if baseline else {}
    for header in ("screen", "grid", "tokens", "scale x, y", *([baseline.name] if baseline and others else [])):
        table.add_column(header, justify="right")
    for screen in found.screens:
        row = [screen.name, screen.grid, f"{screen.tokens:,}", "{:.2f}, {:.2f}".format(*screen.scale)]
        table.add_row(*row, *([f"{others[screen.name]:,}"] if others else []))
    return table


def _files(found: Inspection) -> Table:
    table = _grid("left", "left")
    if found.files is not None:
        sizes = found.files.sizes
        weights = {name: count for name, count in sizes.items() if name.endswith(".safetensors")}
        if weights:
            dtypes = ", ".join(f"{dtype} {size(count)}" for dtype, count in found.files.tensor_bytes.items())
            table.add_row("weights", f"{size(sum(weights.values()))} in {len(weights)} file(s): {dtypes}")
        others = [name for name in sizes if name not in weights]
        table.add_row("other files", ", ".join(others) or "none")
    table.add_row("keys", "not compared" if found.fit is None else _fit(found))
    table.add_row("contract", found.contract or "none found")
    table.add_row("chat template", f"its own, {found.template}" if found.template else "none; this package's is used")
    return table


def _fit(found: Inspection) -> Text:
    assert found.fit is not None
    if found.fit.fits:
        return Text("all fit the config", "green")
    return Text("\n".join(_misfits(found)), "red")


def _misfits(found: Inspection) -> Iterator[str]:
    assert found.fit is not None
    for kind in ("missing", "unexpected", "mismatched"):
        keys: list[str] = getattr(found.fit, kind)
        if keys:
            yield f"{len(keys)} {kind}:"
            yield from (f"  {key}" for key in keys[:_LISTED])
            if len(keys) > _LISTED:
                yield f"  and {len(keys) - _LISTED} more (--json lists all)"


def billions(count: int) -> str:
    """12.32 B, 652 M, 9,216."""
    for limit, unit in ((10**9, "B"), (10**6, "M")):
        if count >= limit:
            return f"{count / limit:.2f} {unit}"
    return f"{count:,}"


def size(count: int) -> str:
    """Bytes in decimal units, as disks are sold and model cards speak."""
    for limit, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count} B"
