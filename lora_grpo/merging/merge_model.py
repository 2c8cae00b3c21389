"""`lora-grpo merge`: merge an adapter into its base and report the rounding error."""

import contextlib
import ctypes
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from lora_grpo import __version__, console
from lora_grpo.commands import command
from lora_grpo.errors import RunError, UserError
from lora_grpo.files import atomic, disk, lock, model_tensors
from lora_grpo.flags import Flag
from lora_grpo.merging import writer
from lora_grpo.merging.base_weights import MergeTarget, base_tensors, empty_model
from lora_grpo.merging.divergence import measure_divergences
from lora_grpo.merging.fidelity import choose
from lora_grpo.merging.mapping import plan_merge
from lora_grpo.merging.report import REPORT, Base, MergeReport, check_merged_from, read_report, show
from lora_grpo.models import (
    START,
    ModelFlags,
    ModelSpec,
    base_model,
    choose_adapter,
    completion_ends,
    engines,
    holds_adapter,
    model_files,
    nested_adapter,
    peft_folder,
    resolve,
    run_of,
    stop_tokens,
    tokenizer_of,
)
from lora_grpo.runs import system_prompt

_M_MMAP_THRESHOLD = -3
"""Parameter of glibc's mallopt: larger allocations are mapped one by one, and unmapped when they are freed."""
_M_TRIM_THRESHOLD = -1
"""Parameter of glibc's mallopt: the free memory that it keeps."""
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
        UserError: the adapter cannot be merged, or another process writes to the output; nothing is written.
        RunError: a merged weight is NaN or infinite, or the disk is full.
    """
    source = choose_adapter(options.source, options.what)
    if Path(source).is_file():
        raise UserError(f"{source} is a file; pass the folder of a run or of an adapter")
    target = resolve(source, options, any_base=options.force_base)
    if target.adapter is None:
        raise UserError(f"{source} is a full model; pass a run or an adapter to merge")
    if options.onto == "dequantized" and target.run is not None and target.base.loaded_bits == 16:
        raise UserError(f"{source} was trained on a base in 16 bits, not on NF4 values; leave out --onto dequantized")
    output = (options.output or default_output(source)).expanduser().resolve()
    if output.exists() and not output.is_dir():
        raise UserError(f"--output-dir {output} is a file; pass a folder")
    identity = _identity(target, options)
    report = _finished_report(output, options, identity)
    if report is None:
        with lock.holding_new(output):
            # Another process may have finished one since.
            report = _finished_report(output, options, identity) or _merge(target, output, options, identity)
    show(output, report)
    console.result(f"verify    {_how_to_verify(target, source, output, options, report)}")
    return output


def _how_to_verify(target: ModelSpec, source: str, output: Path, options: MergeOptions, report: MergeReport) -> str:
    """Return the command that verifies a merged model, or why there is none."""
    trained_on = target.run["policy"].get("fingerprint") if target.run else None
    if trained_on not in (None, report.base.fingerprint):
        return "only on the base in run.json, and --force-base has accepted another one"
    flags: list[str] = []
    if options.base:
        flags += ["--base", options.base]
    if options.revision:
        flags += ["--revision", options.revision]
    if options.trust_remote_code:
        flags.append("--trust-remote-code")
    if options.onto == "dequantized":
        flags += ["--bits", "4"]
    return command("verify", source, *flags, "--against", output)


def _identity(target: ModelSpec, options: MergeOptions) -> dict[str, str]:
    """Return the digests and settings that decide what a merge writes, except for the dtype."""
    digests = target.identity
    return {
        "config_sha256": digests["config_sha256"],
        "adapter_sha256": digests["adapter_sha256"],
        "tokenizer_sha256": digests["tokenizer_sha256"],
        "base_sha256": model_files.weights_fingerprint(Path(target.base.name)),
        "onto": options.onto,
        "kit": __version__,
    }


def merged_model(folder: Path, check: Callable[[Path], object] | None = None) -> Path:
    """Return the folder itself if it is a model, otherwise the merged model of its run or adapter.

    Args:
        check: called with the folder of the base before a merge. It may refuse the base with an error.

    Raises:
        UserError: the merged model was not made from the adapter as it is now, or the adapter cannot be merged.
    """
    is_run = (folder / "run.json").is_file()
    if not is_run and not holds_adapter(folder):
        adapter = nested_adapter(folder)
        if adapter and not (folder / "config.json").is_file():
            raise UserError(f"{folder} has no model and no adapter; pass {adapter}")
        return folder
    merged = default_output(str(folder.absolute()))
    if merged.is_dir():
        adapter = folder / "adapter" if is_run else folder
        if holds_adapter(adapter):  # a run may have lost its own since
            check_merged_from(merged, peft_folder(adapter), adapter)
        return merged
    if check:
        with _errors_of_merge(folder):
            base = resolve(str(folder), ModelFlags()).base
        check(Path(base.name))
    with _errors_of_merge(folder):
        return merge(MergeOptions(str(folder)))


@contextlib.contextmanager
def _errors_of_merge(folder: Path) -> Iterator[None]:
    """Name the command `merge` in UserErrors of the block: they name its flags, which the caller's command lacks."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{command('merge', folder)}: {error}") from error


def default_output(source: str) -> Path:
    """Return `merged` in the adapter's run, or a folder in `outputs` for a Hub id, or a folder next to the adapter."""
    if not model_files.is_folder_name(source):
        return Path("outputs") / f"{source.rpartition('/')[2]}-merged"
    folder = Path(source).expanduser()
    run = run_of(folder)
    adapter = (folder / "adapter" if folder == run else folder).resolve()
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
    differences = [name for name, value in identity.items() if report.identity.get(name) != value]
    if options.dtype not in ("auto", report.dtype):
        differences.append("dtype")
    if differences:
        raise UserError(
            f"{output} contains another merge ({report.onto}, {report.dtype}), with another {', '.join(differences)}; "
            "delete it or pass another --output-dir"
        )
    model_tensors(output)  # raises UserError for truncated and missing files
    return report


def _merge(target: ModelSpec, output: Path, options: MergeOptions, identity: dict[str, str]) -> MergeReport:
    """Merge the adapter into `output`, a folder that appears when it is complete, and return its report."""
    assert target.adapter is not None
    base_folder = Path(target.base.name)
    _return_freed_memory()
    engines.silence_libraries()

    # Plan: names, shapes and dtypes, without data.
    model = empty_model(base_folder, trust_remote_code=target.base.trust_remote_code)
    base = base_tensors(base_folder, options.onto, model, target.base_name)
    plan = plan_merge(base, target.adapter, model)
    _check_vocabulary(target, model.get_input_embeddings().num_embeddings)
    special_tokens = _special_tokens(target)

    # Choose the dtype: rounds a block of every changed tensor.
    choice = choose(options.dtype, plan)
    shards = writer.lay_out(plan, choice.dtype)

    with atomic.new_folder(output) as staging:
        # Write the model, block by block.
        disk.check_free_space(staging, sum(shard.num_bytes for shard in shards) + _RESERVED_BYTES)
        writer.write_shards(staging, shards)
        writer.write_index(staging, shards)
        writer.write_config(staging, base_folder, plan, choice.dtype)
        writer.write_generation_config(
            staging, base_folder, model.config, special_tokens.end_ids, special_tokens.pad_id
        )
        _copy_other_files(target, staging)

        # Compare the written model with the adapter on its base.
        kl = measure_divergences(target, model, base, plan, staging, options.onto)
        report = MergeReport(
            identity=identity,
            dtype=choice.dtype,
            reason=choice.reason,
            onto=options.onto,
            base=_base(target, identity["base_sha256"], is_forced=options.force_base),
            retained=choice.retained,
            kl=kl,
            untied=plan.tie_word_embeddings is False,
            chat_template=target.template_from,
            system_prompt=_training_prompt(target),
        )
        atomic.write_json(staging / REPORT, report.model_dump())
    return report


def _return_freed_memory() -> None:
    """Have glibc return the memory of freed weights to the system. By default, it keeps much of this memory."""
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 8 << 20)
        # Setting the first threshold resets this one to 128 kB. glibc would then return almost every block, and the
        # kernel would zero its memory again.
        ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, 64 << 20)


@dataclass(frozen=True)
class _SpecialTokens:
    """Ids of tokens for the generation config of the merged model."""

    end_ids: list[int]
    """The tokens that end a completion; empty if unknown."""
    pad_id: int | None


def _special_tokens(target: ModelSpec) -> _SpecialTokens:
    """Return the tokens that end a completion of the merged model, and its padding token.

    The tokens are unknown for a base without a tokenizer, or without a token that ends a completion. Such a base is
    merged all the same.

    Raises:
        UserError: the base's generation config cannot be read, or declares what is not the id of a token.
    """
    unknown = _SpecialTokens([], None)
    stop_tokens.generation_config(target.base, target.base_name)  # checks the ids, also without a tokenizer
    try:
        tokenizer = tokenizer_of(target)
    except UserError:
        return unknown
    try:
        end_ids = completion_ends(target, tokenizer)
    except RunError as error:
        console.note(f"note: {error}; to end them, write eos_token_id into generation_config.json")
        return unknown
    return _SpecialTokens(end_ids, tokenizer.pad_token_id)


def _check_vocabulary(target: ModelSpec, vocab_size: int) -> None:
    """Raise a UserError if the adapter's tokenizer adds tokens for which the merged model has no embedding.

    A token of the base's own tokenizer may lack an embedding: Gemma 3's tokenizer has a token for images that its text
    models cannot embed.
    """
    if target.tokenizer != target.adapter:
        return
    tokens = _vocabulary(target, target.tokenizer)
    try:
        base_tokens = _vocabulary(target, Path(target.base.name))
    except UserError:  # the base has no tokenizer
        base_tokens = {}
    added_ids = [token_id for token, token_id in tokens.items() if base_tokens.get(token) != token_id]
    num_tokens = max(added_ids, default=0) + 1
    if num_tokens > vocab_size:
        raise UserError(
            f"the tokenizer in {target.tokenizer} has {num_tokens} tokens, and the merged model has embeddings of "
            f"{vocab_size}; merge it with PEFT, or delete the tokenizer's files to merge with the base's tokenizer"
        )


def _vocabulary(target: ModelSpec, folder: Path) -> dict[str, int]:
    """Return the ids of the tokens of the tokenizer in a folder."""
    settings = dataclasses.replace(target.base, name=str(folder), revision=None)
    return dict(base_model.load_tokenizer(settings).get_vocab())


def _base(target: ModelSpec, fingerprint: str, *, is_forced: bool) -> Base:
    """Describe the base, and whether run.json confirms that the adapter was trained on it."""
    policy = target.run["policy"] if target.run else {}
    revision = target.base.revision
    has_fingerprint = bool(policy.get("fingerprint"))  # `resolve` refuses a base with another one, unless it is forced
    has_same_revision = revision is not None and policy.get("revision") == revision
    is_recorded = has_fingerprint or has_same_revision
    name = target.base_name
    if model_files.is_folder_name(name):  # reports are published
        name = model_files.last_part(str(Path(name).expanduser().resolve()))
    return Base(name=name, revision=revision, fingerprint=fingerprint, checked=is_recorded and not is_forced)


def _training_prompt(target: ModelSpec) -> str | None:
    """Return the system prompt of the run that trained the adapter; None if it had none or is unknown."""
    if target.run is None or target.label == START:  # the run did not train the adapter that it started from
        return None
    prompt = system_prompt(target.run)
    if prompt is None:
        return None
    return prompt.encode(errors="replace").decode()  # pydantic takes no lone surrogate


def _copy_other_files(target: ModelSpec, staging: Path) -> None:
    """Copy the tokenizer with its chat templates, image processor, licenses, and custom model code."""
    paths = [target.tokenizer / name for name in model_files.TOKENIZER_FILES]
    for pattern in (*model_files.PROCESSOR_FILES, "*.py", *model_files.LICENSE_FILES):
        paths += Path(target.base.name).glob(pattern)
    for path in paths:
        if path.is_file():
            shutil.copyfile(path, staging / path.name)

    # Chat templates. Those to use in place of the tokenizer's become files, which take precedence over templates in
    # tokenizer_config.json. Without them, the tokenizer's own stay: all but those in a folder are copied by now.
    template_folder = target.tokenizer / model_files.MORE_TEMPLATES
    staging_folder = staging / model_files.MORE_TEMPLATES
    if target.chat_templates:
        for name, template in target.chat_templates.items():
            if name == "default":
                path = staging / model_files.TEMPLATE_FILE
            else:
                path = staging_folder / f"{name}.jinja"
                staging_folder.mkdir(exist_ok=True)
            atomic.write_text(path, template)
    elif template_folder.is_dir():
        shutil.copytree(template_folder, staging_folder)
