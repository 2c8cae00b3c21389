"""`lora-grpo merge`: merge an adapter into its base and report the rounding error."""

import contextlib
import ctypes
import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from lora_grpo import __version__, console
from lora_grpo.commands import command
from lora_grpo.errors import RunError, UserError
from lora_grpo.files import atomic, disk, model_tensors
from lora_grpo.flags import Flag
from lora_grpo.merging import writer
from lora_grpo.merging.base_weights import MergeTarget, base_tensors, empty_model
from lora_grpo.merging.divergence import measure_divergences
from lora_grpo.merging.fidelity import choose
from lora_grpo.merging.mapping import plan_merge
from lora_grpo.merging.report import REPORT, Base, MergeReport, check_current, read_report, show
from lora_grpo.models import (
    ADAPTER_CONFIG,
    ModelFlags,
    ModelSpec,
    base_model,
    choose_adapter,
    completion_ends,
    model_files,
    resolve,
    run_of,
    tokenizer_of,
)

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
"""glibc's mallopt: larger allocations are mapped one by one and unmapped when freed; and the free memory it keeps."""
_RESERVED_BYTES = 64 * 2**20
"""Disk space reserved for the tokenizer, the configuration, and other processes."""


@dataclass(frozen=True)
class MergeOptions(ModelFlags):
    """Flags of `lora-grpo merge`."""

    source: Annotated[str, Flag("RUN|ADAPTER")]
    """A run folder, an adapter folder, or the Hub id of an adapter."""
    output: Annotated[Path | None, Flag("--output-dir", "--output")] = None
    """Folder of the merged model; default: `merged` or `best-merged` in the run, or `<adapter>-merged` next to an
    adapter."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Precision of the merged weights; `auto` uses the lowest that keeps 99% of the update."""
    onto: MergeTarget = "full"
    """Merge into the base's own weights (`full`) or into the NF4 values that 4-bit training used (`dequantized`)."""
    force_base: bool = False
    """Accept a base with weights that differ from those recorded in run.json."""


def merge(options: MergeOptions) -> Path:
    """Merge the adapter, print the report, and return the merged model's folder.

    Raises:
        UserError: the adapter cannot be merged; nothing is written.
        RunError: a merged weight is NaN or infinite, or the disk is full.
    """
    source = choose_adapter(options.source, options.what)
    if Path(source).is_file():
        raise UserError(f"{source} is a file; pass the folder of a run or of an adapter")
    target = resolve(source, options, any_base=options.force_base)
    if target.adapter is None:
        raise UserError(f"{source} is a full model; pass a run or an adapter to merge")
    output = (options.output or default_output(source, target.adapter)).expanduser().resolve()
    if output.exists() and not output.is_dir():
        raise UserError(f"--output-dir {output} is a file; pass a folder")
    digests = {name: target.identity[name] for name in ("config_sha256", "adapter_sha256", "tokenizer_sha256")}
    base_sha256 = model_files.weights_fingerprint(Path(target.base.name))
    identity = {**digests, "base_sha256": base_sha256, "onto": options.onto, "kit": __version__}
    report = _finished_report(output, options, identity) or _merge(target, output, options, identity)
    show(output, report)
    return output


def merged_model(folder: Path, check: Callable[[Path], object] | None = None) -> Path:
    """Return a model folder, or the merged model of a run or adapter. Before a merge, `check` gets the base."""
    is_run = (folder / "run.json").is_file()
    if not is_run and not (folder / ADAPTER_CONFIG).is_file():
        return folder
    merged = default_output(str(folder.absolute()), folder / "adapter" if is_run else folder)
    if merged.is_dir():
        check_current(merged)
        return merged
    if check:
        check(Path(resolve(str(folder), ModelFlags()).base.name))
    try:
        return merge(MergeOptions(str(folder)))
    except UserError as error:  # names flags of merge, which the caller's command does not have
        raise UserError(f"{command('merge', folder)}: {error}") from error


def default_output(source: str, adapter: Path) -> Path:
    """Return `merged` in the adapter's run, or a folder in `outputs` for a Hub id, or a folder next to the adapter."""
    if not model_files.is_folder_name(source):
        return Path("outputs") / f"{source.rpartition('/')[2]}-merged"
    run, adapter = run_of(adapter), adapter.resolve()
    if run is not None and adapter == (run / "adapter").resolve():
        return run / "merged"
    return adapter.with_name(f"{adapter.name}-merged")


def _finished_report(output: Path, options: MergeOptions, identity: dict[str, str]) -> MergeReport | None:
    """Return the report if the output folder already contains this merge; anything else in it is an error."""
    if not output.is_dir() or not any(output.iterdir()):
        return None
    report = read_report(output)
    if report is None:
        raise UserError(f"{output} contains other files; pass another --output-dir")
    differs = [name for name, value in identity.items() if report.identity.get(name) != value]
    differs += ["dtype"] if options.dtype not in ("auto", report.dtype) else []
    if differs:
        raise UserError(
            f"{output} contains another merge ({report.onto}, {report.dtype}), with another {', '.join(differs)}; "
            "delete it or pass another --output-dir"
        )
    model_tensors(output)  # raises UserError for truncated and missing files
    return report


def _merge(target: ModelSpec, output: Path, options: MergeOptions, identity: dict[str, str]) -> MergeReport:
    assert target.adapter is not None
    folder = Path(target.base.name)
    with contextlib.suppress(AttributeError):  # not glibc, which would keep the memory of many freed weights
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 8 << 20)
        # A fixed threshold resets this one to 128 kB: the kernel would zero the memory of almost every block again.
        ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, 64 << 20)
    base_model.silence_libraries()
    model = empty_model(folder, trust_remote_code=target.base.trust_remote_code)
    base = base_tensors(folder, options.onto, model)
    plan = plan_merge(base, target.adapter, model)
    _check_vocabulary(target, model.get_input_embeddings().num_embeddings)
    ends, pad = _ends(target)
    dtype, reason, retained = choose(options.dtype, plan)
    shards = writer.lay_out(plan, dtype)
    with atomic.new_folder(output) as staging:
        disk.check_free_space(staging, sum(shard.num_bytes for shard in shards) + _RESERVED_BYTES)
        writer.write_shards(staging, shards)
        writer.write_index(staging, shards)
        writer.write_config(staging, folder, plan, dtype)
        writer.write_generation_config(staging, folder, model.config, ends, pad)
        _copy_other_files(target, staging)
        report = MergeReport(
            identity=identity,
            dtype=dtype,
            reason=reason,
            onto=options.onto,
            base=_base(target, identity["base_sha256"], is_forced=options.force_base),
            retained=retained,
            kl=measure_divergences(target, model, base, plan, staging, options.onto),
            untied=plan.tie_word_embeddings is False,
            chat_template=target.template_from,
        )
        atomic.write_json(staging / REPORT, report.model_dump())
    return report


def _ends(target: ModelSpec) -> tuple[list[int], int | None]:
    """Return the tokens that end a completion of the merged model, and its padding token; ([], None) if unknown.

    A base without a tokenizer, or without a token that ends a completion, is merged as it is.

    Raises:
        UserError: the base's generation config cannot be read, or declares what is not the id of a token.
    """
    base_model.generation_config(target.base, target.base_name)  # its ids are checked also without a tokenizer
    try:
        tokenizer = tokenizer_of(target)
    except UserError:
        return [], None
    try:
        return completion_ends(target, tokenizer), tokenizer.pad_token_id
    except RunError as error:
        console.note(f"note: {error}; to end them, write eos_token_id into generation_config.json")
        return [], None


def _check_vocabulary(target: ModelSpec, vocab_size: int) -> None:
    """Raise a UserError if the adapter's tokenizer adds tokens for which the merged model has no embedding.

    The base's own tokens may exceed it: Gemma 3's tokenizer has a token for images that its text models cannot embed.
    """

    def tokens(folder: Path) -> dict[str, int]:
        settings = dataclasses.replace(target.base, name=str(folder), revision=None)
        return dict(base_model.load_tokenizer(settings).get_vocab())

    if target.tokenizer != target.adapter:
        return
    found = tokens(target.tokenizer)
    with contextlib.suppress(UserError):  # the base may have no tokenizer
        found = dict(found.items() - tokens(Path(target.base.name)).items())
    if (size := max(found.values(), default=0) + 1) > vocab_size:
        raise UserError(
            f"the tokenizer in {target.tokenizer} has {size} tokens, and the merged model has embeddings of "
            f"{vocab_size}; merge it with PEFT, or delete the tokenizer's files to merge with the base's tokenizer"
        )


def _base(target: ModelSpec, fingerprint: str, *, is_forced: bool) -> Base:
    """Describe the base, and whether run.json confirms that the adapter was trained on it."""
    recorded, revision, name = (target.run or {}).get("policy", {}), target.base.revision, target.base_name
    is_recorded = bool(recorded.get("fingerprint")) or (revision is not None and recorded.get("revision") == revision)
    if model_files.is_folder_name(name):  # reports are published
        name = model_files.last_part(str(Path(name).expanduser().resolve()))
    return Base(name=name, revision=revision, fingerprint=fingerprint, checked=is_recorded and not is_forced)


def _copy_other_files(target: ModelSpec, staging: Path) -> None:
    """Copy the tokenizer with its chat templates, image processor, licenses, and custom model code."""
    paths = [target.tokenizer / name for name in model_files.TOKENIZER_FILES]
    for pattern in (*model_files.PROCESSOR_FILES, "*.py", *model_files.LICENSE_FILES):
        paths += Path(target.base.name).glob(pattern)
    for path in paths:
        if path.is_file():
            shutil.copyfile(path, staging / path.name)

    # Templates in tokenizer_config.json are copied with it. Files take precedence over them.
    more = staging / model_files.MORE_TEMPLATES
    if target.chat_templates:
        for name, template in target.chat_templates.items():
            path = staging / model_files.TEMPLATE_FILE if name == "default" else more / f"{name}.jinja"
            path.parent.mkdir(exist_ok=True)
            atomic.write_text(path, template)
    elif (target.tokenizer / model_files.MORE_TEMPLATES).is_dir():
        shutil.copytree(target.tokenizer / model_files.MORE_TEMPLATES, more)
