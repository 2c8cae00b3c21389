"""The peaks of GPU memory by phase, from counters of a GPU that does not exist."""

import pytest
from helpers.tiny_runs import run_tiny

from lora_grpo.config import RunConfig, replace
from lora_grpo.memory import GIB
from lora_grpo.monitoring import PhasePeaks, StepMetrics, peaks_of_run
from lora_grpo.monitoring.phase_peaks import GpuCounters, excess
from lora_grpo.runs import read_metrics


class FakeGpu(GpuCounters):
    """A GPU whose tensors and other memory are set in GiB, with torch's rule for the peaks."""

    def __init__(self, outside=0.5):
        self.outside = outside
        """CUDA's context, and less than nothing if vLLM has returned what torch counts."""
        self.allocated = 0.0
        self.peak = 0.0

    def hold(self, gib):
        self.allocated = gib
        self.peak = max(self.peak, gib)

    def allocated_peak(self):
        return int(self.peak * GIB)

    def reserved_peak(self):
        return int((self.peak + 1) * GIB)

    def reserved(self):
        return int((self.allocated + 1) * GIB)

    def used(self):
        return self.reserved() + int(self.outside * GIB)

    def reset(self):
        self.peak = self.allocated


def train_a_step(peaks, gpu, *, micro_batches=2):
    """Sample, score and train as a trainer does; vLLM with a cache of 2 GiB sleeps when it does not sample."""
    with peaks.phase("sampling", then="scoring"):
        gpu.outside += 2
        gpu.hold(4.0)
        gpu.hold(3.0)
        gpu.outside -= 2
    gpu.hold(7.0)
    gpu.hold(3.0)
    for index in range(micro_batches):
        with peaks.phase("loss", then="backward"):
            gpu.hold(5.0 + index)
        gpu.hold(9.0)
        gpu.hold(3.0)


def test_each_phase_has_its_own_peak():
    gpu = FakeGpu()
    peaks = PhasePeaks(gpu)
    gpu.hold(12.0)  # loading the engine
    gpu.hold(3.0)
    assert peaks.end_start() == 12.5 * GIB
    gpu.outside -= 2  # vLLM sleeps, but torch still counts its cache
    gpu.hold(20.0)  # the check of logprobs, which belongs to no phase
    gpu.hold(3.0)
    peaks.enter(None)

    values = {}
    metrics = StepMetrics(values)
    metrics.peaks = peaks
    train_a_step(peaks, gpu)
    metrics.complete()
    measured = {name: value for name, [value] in values.items() if "reserved" not in name}
    # Awake, vLLM's 2 GiB are in use; asleep, they are counted by torch and returned.
    assert measured == {"memory/sampling": 4.5, "memory/scoring": 5.5, "memory/loss": 4.5, "memory/backward": 7.5}
    assert values["memory/loss_reserved"] == [5.5]
    with peaks.phase("validation"):  # which samples too
        gpu.outside += 2
        gpu.hold(4.0)
        gpu.hold(3.0)
        gpu.outside -= 2
    assert peaks.end_step()["memory/validation"] == 4.5
    assert peaks.highest["start"] == 12.5 * GIB and peaks.highest["backward"] == 7.5 * GIB


def test_a_step_does_not_inherit_from_the_step_or_the_validation_before():
    gpu = FakeGpu()
    peaks = PhasePeaks(gpu)
    train_a_step(peaks, gpu)
    with peaks.phase("validation"):
        gpu.hold(30.0)
        gpu.hold(3.0)
    first = peaks.end_step()
    assert (first["memory/validation"], first["memory/backward"]) == (30.5, 9.5)
    with peaks.phase("loss", then="backward"):
        gpu.hold(4.0)
    assert peaks.end_step().keys() == {
        f"memory/{name}" for name in ("loss", "loss_reserved", "backward", "backward_reserved")
    }
    assert peaks.highest["validation"] == 30.5 * GIB


def test_memory_of_other_processes_is_not_the_runs():
    gpu = FakeGpu(outside=3.0)
    peaks = PhasePeaks(gpu, used_by_others=int(2.5 * GIB))
    with peaks.phase("loss"):
        gpu.hold(4.0)
    assert peaks.end_step()["memory/loss"] == 4.5


def test_without_a_gpu_nothing_is_measured():
    peaks = PhasePeaks()
    with peaks.phase("loss", then="backward"):
        pass
    assert (peaks.end_start(), peaks.end_step(), peaks.highest) == (None, {}, {})


START_AGAIN = "start over with a smaller --sampling.max-completion-tokens"
PLAN = {
    "planned_phases_gib": {"sampling": 5.0, "loss": 4.0},
    "free_gib": 11.5,
    "gpu_memory_share": 0.3,
    "least_gpu_memory_share": 0.2,
    "engine_sleeps": True,
}


def config_with(micro_batch_size, prompts=8):
    changes = {"train": {"micro_batch_size": micro_batch_size, "prompts_per_step": prompts}}
    return replace(RunConfig(), changes | {"sampling": {"num_generations": 6}})


@pytest.mark.parametrize(
    ("plan", "metrics", "advice"),
    [
        ({}, {"memory/loss": 4.3, "memory/sampling": 5.0}, {}),
        ({}, {"memory/loss": 4.5}, {"loss": "pass --resume --train.micro-batch-size 8"}),
        ({"engine_sleeps": False}, {"memory/loss": 4.5}, {"loss": "pass --resume --sampling.engine-sleep"}),
        ({}, {"memory/sampling": 6.0}, {"sampling": "pass --resume --model.gpu-memory-share 0.24"}),
        ({"least_gpu_memory_share": 0.25}, {"memory/sampling": 6.0}, {"sampling": START_AGAIN}),
        ({"gpu_memory_share": None}, {"memory/sampling": 6.0}, {"sampling": START_AGAIN}),
        ({}, {"memory/validation": 60.0}, {}),  # not planned
    ],
)
def test_a_phase_that_exceeds_its_plan_says_what_to_do(plan, metrics, advice):
    warnings = excess(config_with(16), PLAN | plan, metrics)
    assert warnings.keys() == advice.keys()
    for phase, words in advice.items():
        assert warnings[phase].endswith(f"; if a step runs out of memory, {words}") and "\n" not in warnings[phase]


@pytest.mark.parametrize(("micro_batch_size", "prompts", "smaller"), [(18, 3, 9), (9, 3, 3), (3, 3, 1), (1, 3, None)])
def test_the_advised_micro_batch_divides_the_step(micro_batch_size, prompts, smaller):
    warning = excess(config_with(micro_batch_size, prompts), PLAN, {"memory/loss": 4.5})["loss"]
    advice = f"pass --resume --train.micro-batch-size {smaller}" if smaller else START_AGAIN
    assert warning.endswith(f", {advice}")


def test_nothing_is_measured_in_a_memory_that_gpu_and_cpu_share(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Card")
    plan = {"gpu": "Card", "total_gib": 119.0, "free_gib": 110.0}
    for is_unified in (False, True):
        peaks = peaks_of_run({"memory": plan | {"is_unified": is_unified}})
        assert (peaks._counters is None) is is_unified


@pytest.mark.parametrize("method", ["grpo", "sft"])
def test_a_run_logs_its_phases_and_warns_once_of_each_that_exceeds_its_plan(method, tmp_path, capsys):
    def count(training):
        gpu = FakeGpu(outside=1.75)
        gpu.hold(0.25)
        training.trainer.step_metrics.peaks = PhasePeaks(gpu)
        planned = {"sampling": 2.5, "loss": 1.0, "backward": 2.5}
        training.run.record["memory"] = {"planned_phases_gib": planned, "free_gib": 7.5, "engine_sleeps": True}
        training.run.record["memory"]["gpu_memory_share"] = None

    phases = {"loss", "backward"} if method == "sft" else {"sampling", "scoring", "loss", "backward"}
    run, _ = run_tiny(
        tmp_path / "run",
        before=count,
        method=method,
        train={"micro_batch_size": 2, "max_steps": 2},
        sampling={"max_completion_tokens": 8},
    )
    for line in read_metrics(run.folder):
        assert {name for name in line if name.startswith("memory/") and "_" not in name} == {
            f"memory/{phase}" for phase in phases
        }
        assert line["memory/loss"] == 2
    assert run.record["peak_gpu_memory_gib"] == 2  # with what is outside of torch
    assert run.record["torch_peak_gib"] == 0.25
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: loss took 2.00 GiB")]
    assert len(warnings) == 1 and "of GPU memory" in warnings[0]
