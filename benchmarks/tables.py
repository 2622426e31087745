"""Write the measured figures into the documents that show them.

    python benchmarks/tables.py          rewrite every block that is out of date
    python benchmarks/tables.py --check  only say which are, and exit with 1

A block names a file of benchmarks/results, and may pick figures of it and their order:

    <!-- figures:pilot parameters demo_seconds -->
    (generated)
    <!-- /figures -->

Figures named `*_mean` or `*_rate` are fractions from 0 to 1. A block `<!-- tasks:pilot -->` ... `<!-- /tasks -->`
becomes a table of success by task and policy, from the rows of that file. A block `<!-- lengths:recall -->` ...
`<!-- /lengths -->` becomes a table of accuracy by task, length and model, from rows as `recall.py` makes them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(
    r"(?P<open><!-- figures:(?P<name>[\w-]+)(?P<picked>(?: [\w-]+)*) -->\n).*?(?P<close><!-- /figures -->)",
    re.DOTALL,
)
TASKS = re.compile(r"(?P<open><!-- tasks:(?P<name>[\w-]+) -->\n).*?(?P<close><!-- /tasks -->)", re.DOTALL)
LENGTHS = re.compile(r"(?P<open><!-- lengths:(?P<name>[\w-]+) -->\n).*?(?P<close><!-- /lengths -->)", re.DOTALL)
# What a reader calls a figure, in English and Spanish. One that is not listed appears under its own name.
LABELS = {
    "miniwob_easy20_mean": (
        "Mean success on 20 easy MiniWoB++ tasks, unseen seeds",
        "Éxito medio en 20 tareas fáciles de MiniWoB++, semillas no vistas",
    ),
    "miniwob_easy20_tasks_ge_60": (
        "Tasks of the 20 with at least 60 % success",
        "Tareas, de las 20, con al menos un 60 % de éxito",
    ),
    "miniwob_easy20_tokens_only_mean": (
        "The same pilot with plain coordinate tokens, as another engine would run it",
        "El mismo piloto con coordenadas como texto, como lo serviría otro motor",
    ),
    "demo_mean": ("Demo: mean success, 3 seeds a task", "Demo: éxito medio, 3 semillas por tarea"),
    "tokens_per_s": ("Demo: prompt and output tokens per second", "Demo: tokens de entrada y salida por segundo"),
    "kv_bytes_step_1": ("Keys and values per session after 1 step", "Claves y valores por sesión tras 1 paso"),
    "kv_bytes_step_20": ("Keys and values per session after 20 steps", "Claves y valores por sesión tras 20 pasos"),
    "vllm_greedy_agreement": (
        "Greedy tokens that vLLM and the native engine share",
        "Tokens voraces en los que coinciden vLLM y el motor nativo",
    ),
    "vllm_greedy_agreement_pilot": (
        "Share of equal greedy tokens: the pilot",
        "Proporción de tokens voraces iguales: el piloto",
    ),
    "vllm_greedy_agreement_vl_v2": ("the layout of Holotron-12B, tiny", "el formato de Holotron-12B, minúsculo"),
    "vllm_greedy_agreement_vl_v2_vit_small": (
        "the same with a ViT-small tower",
        "lo mismo con una torre ViT-small",
    ),
    "vllm_greedy_agreement_omni": (
        "the layout of Nemotron 3 Nano Omni, tiny, dense layers for experts",
        "el formato de Nemotron 3 Nano Omni, minúsculo, capas densas por expertos",
    ),
    "tokens_compared": ("Tokens compared", "Tokens comparados"),
    "logprob_difference": (
        "Largest difference of a chosen token's log probability",
        "Mayor diferencia del logaritmo de la probabilidad de un token elegido",
    ),
    "seeds": ("Seeds a task", "Semillas por tarea"),
    "tokens_only_seeds": ("Seeds a task, plain coordinate tokens", "Semillas por tarea, coordenadas como texto"),
    "untrained_seeds": ("Seeds a task, untrained pilot", "Semillas por tarea, piloto sin entrenar"),
    "pointer_click_accuracy": ("Pointer (coordinate tokens beside it)", "Puntero (con tokens de coordenadas al lado)"),
    "pointer_run_tokens_click_accuracy": ("The same run read from its tokens", "La misma, leída de sus tokens"),
    "tokens_attention_click_accuracy": (
        "Coordinate tokens, attention supervised",
        "Tokens de coordenadas, atención supervisada",
    ),
    "tokens_aux_pointer_click_accuracy": (
        "Coordinate tokens, pointer as auxiliary loss",
        "Tokens de coordenadas, puntero como pérdida auxiliar",
    ),
    "questions_asked": ("Held-out questions asked", "Preguntas apartadas"),
    "steps": ("Training batches of each run", "Lotes de entrenamiento de cada prueba"),
    "random_easy20_mean": ("The same with random clicks", "Lo mismo con clics al azar"),
    "untrained_easy20_mean": ("The same with an untrained pilot", "Lo mismo con un piloto sin entrenar"),
    "parameters": ("Parameters of the pilot", "Parámetros del piloto"),
    "train_speedup_vs_transformers": (
        "Training step, labels on replies: transformers' time over ours",
        "Paso de entrenamiento, etiquetas en las respuestas: tiempo de transformers entre el nuestro",
    ),
    "train_all_labels_speedup_vs_transformers": (
        "The same, every token labelled",
        "Lo mismo, con todos los tokens etiquetados",
    ),
    "train_tokens_per_s": ("Tokens trained per second", "Tokens entrenados por segundo"),
    "prefill_speedup_vs_transformers": (
        "Prefill of 2,048 tokens: transformers' time over ours",
        "Lectura de 2.048 tokens: tiempo de transformers entre el nuestro",
    ),
    "prefill_tokens_per_s": ("Tokens prefilled per second", "Tokens leídos por segundo"),
    "preprocess_1080p_ms": ("1920x1080 screenshot to tiles, one core", "Captura de 1920x1080 a teselas, un núcleo"),
    "preprocess_1080p_uint8_ms": ("The same, 8-bit resize", "Lo mismo, con reescalado de 8 bits"),
    "max_logit_diff_nemotron_h": (
        "Largest difference of a logit, dense text model",
        "Mayor diferencia de un logit, modelo de texto denso",
    ),
    "max_logit_diff_moe": ("The same, mixture of experts", "Lo mismo, mezcla de expertos"),
    "max_logit_diff_omni_dense": ("The same, with images", "Lo mismo, con imágenes"),
    "demo_first_action_s": ("Demo: time to the first action", "Demo: tiempo hasta la primera acción"),
    "demo_seconds": ("Demo: time in all, 60 episodes", "Demo: tiempo total, 60 episodios"),
    "actions_per_s": ("Demo: actions per second", "Demo: acciones por segundo"),
    "state_bytes_step_1": (
        "Recurrent state per session after 1 step",
        "Estado recurrente por sesión tras 1 paso",
    ),
    "state_bytes_step_20": (
        "Recurrent state per session after 20 steps",
        "Estado recurrente por sesión tras 20 pasos",
    ),
}
WORDS = {
    "en": ("figure", "value", "Measured by `{command}`{rest}.", "Not measured yet."),
    "es": ("cifra", "valor", "Medido con `{command}`{rest}.", "Aún sin medir."),
}


def documents(root: Path = ROOT) -> Iterator[Path]:
    for pattern in ("README*.md", "docs/**/*.md", "weights/*/*.md"):
        yield from sorted(root.glob(pattern))


def refreshed(text: str, language: str, results: Path = RESULTS) -> str:
    """`text` with every block made anew. Raises ValueError for a figure that the results do not hold."""

    def block(found: re.Match[str]) -> str:
        body = table(results / f"{found['name']}.json", found["picked"].split(), language)
        return f"{found['open']}{body}\n{found['close']}"

    def tasks(found: re.Match[str]) -> str:
        body = by_task(results / f"{found['name']}.json", language)
        return f"{found['open']}{body}\n{found['close']}"

    def lengths(found: re.Match[str]) -> str:
        body = by_length(results / f"{found['name']}.json", language)
        return f"{found['open']}{body}\n{found['close']}"

    return LENGTHS.sub(lengths, TASKS.sub(tasks, BLOCK.sub(block, text)))


def by_task(file: Path, language: str) -> str:
    """Success in percent with its 95 % interval, one row a task, one column a policy."""
    if not file.is_file():
        return WORDS[language][3]
    rows = json.loads(file.read_text())["rows"]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    cells = {(row["task"], row["policy"]): row for row in rows}
    lines = ["| task | " + " | ".join(policies) + " |", "|---|" + "---:|" * len(policies)]
    tasks = dict.fromkeys(row["task"] for row in rows)
    for task in sorted(tasks, key=lambda name: (-cells[name, policies[0]]["rate"], name)):
        found = (cells.get((task, policy)) for policy in policies)
        lines.append(f"| {task} | " + " | ".join(_percent(row) for row in found) + " |")
    episodes = (f"{policy} {sum(r['n'] for r in rows if r['policy'] == policy)}" for policy in policies)
    lines += ["", f"Percent, Wilson 95 % interval in brackets. Episodes: {', '.join(episodes)}."]
    return "\n".join(lines)


def by_length(file: Path, language: str) -> str:
    """Accuracy in percent, one row a task and length, one column a model; several seeds as mean (worst-best)."""
    if not file.is_file():
        return WORDS[language][3]
    result = json.loads(file.read_text())
    models: dict[str, str] = {}
    cells: dict[tuple[str, int], dict[str, list[float]]] = {}
    notes: dict[tuple[str, int], tuple[bool, float]] = {}
    for row in result["rows"]:
        models[row["model"]] = f"`{row['pattern']}` N {row['state_size']}" if row["state_bytes"] else "`****`"
        where = row["title"], row["length"]
        cells.setdefault(where, {}).setdefault(row["model"], []).append(row["accuracy"])
        notes[where] = row["trained"], row["chance"]
    lines = [
        "| task | length | " + " | ".join(models.values()) + " | chance |",
        "|---|---:|" + "---:|" * (len(models) + 1),
    ]
    for (task, length), found in cells.items():
        trained, chance = notes[task, length]
        values = " | ".join(_spread(found.get(model, [])) for model in models)
        lines.append(f"| {task} | {length}{'' if trained else ' +'} | {values} | {100 * chance:.1f} |")
    sizes = {row["model"]: row for row in reversed(result["rows"])}  # of the first task
    for label, name, unit in (
        (f"thousand parameters ({result['rows'][0]['title']})", "parameters", 1000),
        ("KiB of recurrent state", "state_bytes", 1024),
        ("KiB of keys and values a token", "kv_bytes_per_token", 1024),
    ):
        lines.append(f"| {label} | | " + " | ".join(f"{sizes[m][name] / unit:.4g}" for m in models) + " | |")
    seeds = result["figures"]["seeds"]
    averaged = "one seed" if seeds == 1 else f"mean of {seeds} seeds (worst-best)"
    measured = WORDS[language][2].format(command=result["command"], rest=_origin(result))
    return "\n".join([*lines, "", f"Right answers in percent; {averaged}. + longer than trained. {measured}"])


def _spread(values: list[float]) -> str:
    if not values:
        return "-"
    low, mean, high = (f"{100 * v:.0f}" for v in (min(values), sum(values) / len(values), max(values)))
    return mean if low == high else f"{mean} ({low}-{high})"


def _percent(row: dict[str, Any] | None) -> str:
    if row is None or not row["n"]:
        return "-"
    return f"{100 * row['rate']:.0f} ({100 * row['low']:.0f}-{100 * row['high']:.0f})"


def table(file: Path, picked: list[str], language: str) -> str:
    figure, value, measured, unmeasured = WORDS[language]
    if not file.is_file():
        return unmeasured
    result = json.loads(file.read_text())
    figures: dict[str, float] = result["figures"]
    for name in picked:
        if name not in figures:
            raise ValueError(f"{file}: no figure {name!r}; it holds {', '.join(figures)}")
    rows = [f"| {figure} | {value} |", "|---|---:|"]
    for name in picked or figures:
        label = LABELS[name][language == "es"] if name in LABELS else f"`{name}`"
        rows.append(f"| {label} | {shown(name, figures[name], language)} |")
    return "\n".join([*rows, "", measured.format(command=result.get("command", file.name), rest=_origin(result))])


def shown(name: str, value: float, language: str) -> str:
    """A figure with the unit that its name implies."""
    if name.endswith(("_mean", "_rate", "_accuracy")):
        text, unit = f"{100 * value:.1f}", " %"
    elif "bytes" in name:
        text, unit = f"{value / 1024:,.1f}", " KiB"
    elif name == "parameters":
        text, unit = f"{value / 1e6:.2f}", " M"
    elif name.endswith("_ms"):
        text, unit = f"{value:,.1f}", " ms"
    elif name.endswith("_speedup_vs_transformers"):
        text, unit = f"{value:,.2f}", "x"
    elif 0 < abs(value) < 1e-3:
        text, unit = f"{value:.1e}", ""
    elif name.endswith(("_seconds", "_s")) and not name.endswith("_per_s"):
        text, unit = f"{value:,.1f}", " s"
    else:
        text, unit = (f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"), ""
    if language == "es":
        text = text.translate(str.maketrans(",.", ".,"))
    return text + unit


def _origin(result: dict[str, Any]) -> str:
    return "".join(f", {part}" for part in (_flat(result.get("machine")), result.get("date"), _commit(result)) if part)


def _flat(machine: Any) -> str:
    parts = machine.values() if isinstance(machine, dict) else [machine]
    return ", ".join(str(part) for part in parts if part)


def _commit(result: dict[str, Any]) -> str:
    commit = str(result.get("commit") or "")
    return f"commit {commit[:10]}" if commit else ""


def main() -> int:
    stale = []
    for document in documents():
        text = document.read_text()
        new = refreshed(text, "es" if document.name.endswith(".es.md") else "en")
        if new != text:
            stale.append(document)
            if "--check" not in sys.argv:
                document.write_text(new)
    for document in stale:
        print(f"{'out of date' if '--check' in sys.argv else 'rewritten'}: {document.relative_to(ROOT)}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
