"""The command line: one thin function per verb.

Anything heavy (torch, transformers, Playwright) is imported inside the command that needs it, so that
`holotron --help` answers at once. How failures are worded is the business of `failures`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from holotron import __version__

STARTED = time.monotonic()

app = typer.Typer(
    name="holotron",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holotron {__version__}")
        raise typer.Exit


@app.callback()
def holotron(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Computer use with hybrid Mamba-2/attention models: see a screen, decide, act.

    What goes wrong is said in one line on standard error; HOLOTRON_DEBUG=1 adds the traceback.
    """


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Say what is installed, found and missing, and the command that mends it.

    Exits with 1 if something that is needed is missing.
    """
    from holotron import doctor as examination

    checks = examination.examine()
    if as_json:
        typer.echo(examination.as_json(checks))
    else:
        examination.show(checks)
    raise typer.Exit(0 if examination.is_healthy(checks) else 1)


ModelOption = Annotated[str, typer.Option("--model", help="Checkpoint folder, endpoint URL, or: oracle, random.")]
WorkersOption = Annotated[int, typer.Option("--workers", min=1, max=64, help="Episodes side by side.")]
ResumeOption = Annotated[Path | None, typer.Option("--resume", help="Run folder to go on with.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Run folder; a new one under runs/ by default.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")]
ContractOption = Annotated[str | None, typer.Option("--contract", help="Default: what the checkpoint says.")]


@app.command()
def demo(
    model: ModelOption = "",
    workers: WorkersOption = 4,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Seeds of each task.")] = 3,
    out: OutOption = None,
    resume: ResumeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch the shipped pilot work on 20 browser tasks from pixels, then open the report it names."""
    from rich.console import Console

    from holotron.demo import find_pilot, run_demo

    console = Console(stderr=as_json)
    chosen = model or str(find_pilot())
    summary, _ = run_demo(chosen, workers, seeds, resume or out, resume is not None, console, STARTED)
    if as_json:
        typer.echo(summary.model_dump_json())


@app.command(name="eval")
def evaluate(
    model: ModelOption,
    tasks: Annotated[str, typer.Option("--tasks", help="easy20, all, or names with commas.")] = "easy20",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Seeds of each task.")] = 100,
    first_seed: Annotated[int, typer.Option("--first-seed", min=0)] = 0,
    workers: WorkersOption = 4,
    max_steps: Annotated[int, typer.Option("--max-steps", min=1)] = 10,
    tokens_only: Annotated[
        bool, typer.Option("--tokens-only", help="Plain coordinate tokens instead of the grounding head.")
    ] = False,
    contract: ContractOption = None,
    out: OutOption = None,
    resume: ResumeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure success on MiniWoB++ tasks, with 95 % intervals; infrastructure failures are counted apart."""
    import asyncio

    from rich.console import Console

    from holotron.evaluation.episodes import read_tasks, run_folder, run_miniwob
    from holotron.evaluation.policies import choose_policy
    from holotron.live import LiveTable, print_summary

    console = Console(stderr=as_json)
    names = read_tasks(tasks)
    chosen = choose_policy(model, contract, workers=workers, tokens_only=tokens_only)
    folder = resume or out or run_folder("eval")
    with LiveTable(names, len(names) * seeds, console) as table:
        summary = asyncio.run(
            run_miniwob(
                chosen, names, range(first_seed, first_seed + seeds), folder,
                workers=workers, resume=resume is not None, on_event=table, max_steps=max_steps,
            )
        )  # fmt: skip
    print_summary(console, summary)
    console.print(f"run: {folder}", soft_wrap=True, highlight=False)
    if as_json:
        typer.echo(summary.model_dump_json())


@app.command()
def run(
    task: Annotated[str, typer.Argument(help="What to do, in your own words.")],
    url: Annotated[str, typer.Option("--url", help="Where to start.")],
    model: ModelOption = "",
    served_name: Annotated[str | None, typer.Option("--served-name", help="Model name at an endpoint.")] = None,
    contract: ContractOption = None,
    prompt_file: Annotated[Path | None, typer.Option("--prompt-file", help="Prompt text of your own.")] = None,
    viewport: Annotated[str, typer.Option("--viewport", help="CSS pixels; default: the checkpoint's.")] = "",
    max_steps: Annotated[int, typer.Option("--max-steps", min=1)] = 30,
    max_seconds: Annotated[float, typer.Option("--max-seconds", min=1)] = 600,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", help="Only these hosts may be reached (repeatable).")
    ] = None,
    headed: Annotated[bool, typer.Option("--headed", help="Show the browser window.")] = False,
    out: OutOption = None,
    resume: ResumeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Drive any page with the pilot or with a model behind an OpenAI-compatible endpoint."""
    from rich.console import Console

    from holotron.demo import find_pilot
    from holotron.web import drive

    drive(
        task, url, model or str(find_pilot()), served_name=served_name, contract=contract,
        prompt_file=prompt_file, viewport=viewport, max_steps=max_steps, max_seconds=max_seconds,
        hosts=allow_host, headless=not headed, out=resume or out, resume=resume is not None,
        console=Console(stderr=as_json), as_json=as_json,
    )  # fmt: skip


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    out: Annotated[Path | None, typer.Option("--out", help="HTML file; default: RUN/report.html.")] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Also draw one PNG of the run.")] = None,
) -> None:
    """Make the static HTML report of a run; it opens offline."""
    from holotron.report.html import write_report
    from holotron.report.picture import write_picture

    typer.echo(write_report(folder, out))
    if picture is not None:
        typer.echo(write_picture(folder, picture))


@app.command()
def look(
    screenshot: Annotated[Path, typer.Argument(metavar="SCREENSHOT", help="PNG, JPEG or WebP file.")],
    task: Annotated[str, typer.Argument(help="The question or task, in your own words.")],
    model: Annotated[Path | None, typer.Option("--model", help="Checkpoint folder; default: the pilot.")] = None,
    at: Annotated[
        str, typer.Option("--at", help="prompt: as it begins to reply. point: as it writes where to click.")
    ] = "prompt",
    layer: Annotated[str, typer.Option("--layer", help="last, mean, all (a panel each), or a layer's place.")] = "last",
    contract: ContractOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="PNG; default: NAME-attention.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Draw what a model attends to on a screenshot, asked as an agent asks it.

    The model sees the task in its own contract's words. Only attention is drawn: what Mamba layers remember has no map.
    """
    from holotron import look as looking
    from holotron.demo import find_pilot

    found = looking.look(screenshot, task, model or find_pilot(), at=at, layer=layer, contract=contract)
    path = looking.draw(found, out or Path(f"{screenshot.stem}-attention.png"))
    if as_json:
        typer.echo(looking.as_json(found, path))
    else:
        typer.echo("\n".join([*looking.summary(found), str(path)]))


class InspectCommand(TyperCommand):
    """Lists the presets under its help. Reading them imports torch, so only when that help is asked for."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from holotron.model.presets import PRESETS

        self.epilog = _list_names("Presets:", {name: preset.description for name, preset in PRESETS.items()})
        super().format_help(ctx, formatter)


class MakeTinyCommand(TyperCommand):
    """Lists the families under its help, as InspectCommand does the presets."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from holotron.model.tiny_checkpoints import FAMILIES

        self.epilog = _list_names("Families:", FAMILIES)
        super().format_help(ctx, formatter)


def _list_names(title: str, descriptions: Mapping[str, str]) -> str:
    lines = (f"[bold]{name}[/bold]: {description}" for name, description in descriptions.items())
    return "\n\n".join([title, *lines])


@app.command(
    name="inspect",
    cls=InspectCommand,
    help="Show a model's layers, parameters, memory per sequence, image tokens and what is unverified about it.\n\n"
    "Weights are not loaded: of a folder's files only the headers are read, of a hub id only the small files are "
    "downloaded. Exits with 1 if a folder's weights do not fit its config.\n\n"
    "In JSON, `layers` is the pattern of the layers, one letter each: M Mamba-2, * attention, - MLP, E experts "
    "(a decoder layer of an attention-only model is two, *-); `layer_counts` sums it up. `tokens_WIDTHxHEIGHT` are "
    "image tokens without the two delimiters, null for a text model. `state_bytes_per_sequence` has the recurrent "
    "state in fp32 and convolution columns in bf16.",
)
def inspect_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder, hub id, or a preset named below.")],
    baseline: Annotated[
        str, typer.Option("--baseline", help="Compare memory with this one: as MODEL, or none.")
    ] = "holo2-8b",
    revision: Annotated[str | None, typer.Option("--revision", help="Commit, tag or branch of a hub id.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    from rich.console import Console

    from holotron import inspection, inspection_view

    found = inspection.inspect(model, revision)
    other = None if baseline in ("none", model) else inspection.inspect(baseline)
    if as_json:
        typer.echo(inspection.as_json(found, other))
    else:
        inspection_view.show(found, other, Console(highlight=False))
    raise typer.Exit(0 if found.fits else 1)


@app.command(
    name="make-tiny",
    cls=MakeTinyCommand,
    help="Write a tiny checkpoint with random weights in the format of a released model, offline.\n\n"
    "It has the keys, config dialect, tokenizer, chat template and processor files of the release, a few megabytes "
    "of weights at most, and the same bytes for the same seed. `holotron inspect OUT` shows it.",
)
def make_tiny_checkpoint(
    family: Annotated[str, typer.Argument(metavar="FAMILY", help="Kind of model, one of those below.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the random weights.")] = 0,
    dtype: Annotated[str, typer.Option("--dtype", help="Of the weights: float32, bfloat16, float16.")] = "float32",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is there.")] = False,
) -> None:
    from holotron.model.tiny_checkpoints import make_tiny

    typer.echo(make_tiny(family, out, seed=seed, overwrite=overwrite, dtype=dtype))


@app.command()
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder or hub id.")],
    engine: Annotated[str, typer.Option("--engine", help="native, or vllm where that is installed.")] = "native",
    host: Annotated[str, typer.Option("--host", help="Address to bind to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8000,
    served_name: Annotated[
        list[str] | None, typer.Option("--served-name", help="What requests call the model (repeatable).")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="HOLOTRON_API_KEY", show_envvar=True, help="Asked of every request."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Bind to a public address although there is no key.")
    ] = False,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", min=1, help="Tokens of prompt and reply; default: the config's.")
    ] = None,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Sequences side by side.")] = 32,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads of the model.")] = None,
    allow_image_host: Annotated[
        list[str] | None,
        typer.Option("--allow-image-host", help="HOST or HOST:PORT to fetch images from (repeatable)."),
    ] = None,
    allow_private_images: Annotated[
        bool, typer.Option("--allow-private-images", help="Those hosts may have private addresses.")
    ] = False,
    max_body_mib: Annotated[int, typer.Option("--max-body-mib", min=1, help="Of one request.")] = 32,
    max_images: Annotated[
        int | None, typer.Option("--max-images", min=1, help="Of one request; default: 64, with vllm 3.")
    ] = None,
    max_pixels: Annotated[int, typer.Option("--max-pixels", min=1, help="Of one image.")] = 2**25,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Of one reply; default: what the context leaves.")
    ] = None,
    max_requests: Annotated[
        int, typer.Option("--max-requests", min=1, help="Running and waiting; more get 429.")
    ] = 512,
    max_queue: Annotated[int, typer.Option("--max-queue", min=1, help="Waiting to be decoded; more get 429.")] = 128,
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", min=0.1, help="For running requests after SIGTERM.")
    ] = 300,
    print_only: Annotated[
        bool, typer.Option("--print-only", help="vllm: show and explain the command, start nothing.")
    ] = False,
    users: Annotated[int, typer.Option("--users", min=1, help="vllm: agents to plan for.")] = 100,
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, help="vllm: of a node; default: those found.")] = None,
    gpu_memory_gib: Annotated[
        float | None, typer.Option("--gpu-memory-gib", min=1, help="vllm: of one GPU; default: as found.")
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option("--tensor-parallel", min=1, help="vllm: GPUs per copy.")
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="vllm: machines, joined by Ray.")] = 1,
    vllm_arg: Annotated[
        list[str] | None, typer.Option("--vllm-arg", help="vllm: handed over as it is (repeatable).")
    ] = None,
) -> None:
    """Serve a model with the API of OpenAI: chat with images, JSON schemas, tools, streaming, metrics."""
    names = tuple(served_name or [Path(model).name if Path(model).is_dir() else model])
    if engine == "vllm":
        from holotron.serving.vllm_launch import launch

        status = launch(
            model, print_only=print_only, gpus=gpus, gpu_memory_gib=gpu_memory_gib, tensor_parallel=tensor_parallel,
            nodes=nodes, users=users, context=max_model_len, images=max_images or 3, host=host, port=port,
            served_name=names[0], api_key=api_key, insecure=insecure, extra=vllm_arg or (),
        )  # fmt: skip
        raise typer.Exit(status)
    if engine != "native" or print_only:
        wrong = "--print-only goes with --engine vllm" if engine == "native" else f"--engine {engine!r} is unknown"
        raise typer.BadParameter(f"{wrong}; engines: native, vllm")
    from holotron.serving.serve import serve as serve_natively
    from holotron.serving.server import Limits, ServerSettings

    limits = Limits(
        body=max_body_mib << 20, bodies=max(512, max_body_mib) << 20, images=max_images or 64, pixels=max_pixels,
        tokens=max_tokens, requests=max_requests, preprocessing=max_queue, drain_seconds=drain_seconds,
    )  # fmt: skip
    settings = ServerSettings(
        names, host, port, api_key or None, insecure, tuple(allow_image_host or ()), allow_private_images, limits
    )
    serve_natively(
        model, settings, max_batch=max_batch, max_model_len=max_model_len, threads=threads,
        say=lambda line: typer.echo(line, err=True),
    )  # fmt: skip


train_app = typer.Typer(no_args_is_help=True, help="Make checkpoints.")
app.add_typer(train_app, name="train")


@train_app.command()
def pilot(
    out: Annotated[Path, typer.Option("--out", help="Where records, checkpoint and model go.")] = Path("runs/pilot"),
    recipe: Annotated[
        Path | None, typer.Option("--recipe", help="YAML of stages; default: that of the shipped pilot.")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Pages collected side by side.")] = 2,
) -> None:
    """Make the pilot again from seeds: collect pages, train, export. Stop and repeat it as you like."""
    from holotron.training.pilot.remake import RECIPE, remake

    typer.echo(remake(out, recipe or RECIPE, workers))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C."""
    from holotron.failures import explain

    try:
        app(args=list(sys.argv[1:] if argv is None else argv), prog_name="holotron")
    except SystemExit as stop:
        if stop.code == 130:  # typer turns Ctrl-C into this, without a word
            typer.echo("holotron: interrupted", err=True)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as failure:
        message, code = explain(failure)
        typer.echo(message, err=True)
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
