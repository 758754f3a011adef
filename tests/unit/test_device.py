"""The device's peak and memory figures."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from torchtitan_graph import device, train
from torchtitan_graph.config import job, load
from torchtitan_graph.errors import UserError
from torchtitan_graph.rates import find_rates

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("AMD Instinct MI300X", 1307),
    ],
)
def test_a_known_gpu_has_its_dense_bf16_peak(name: str, tflops: float) -> None:
    assert device._peak_flops_of(name) == tflops * 1e12


@pytest.mark.parametrize("name", ["Tesla V100-SXM2-32GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "something new", ""])
def test_an_unknown_gpu_or_a_slice_of_one_has_none(name: str) -> None:
    assert device._peak_flops_of(name) is None


def test_a_dry_run_may_name_every_device_whose_rates_are_known() -> None:
    (choices,) = (f.metadata for f in dataclasses.fields(job.Comm) if f.name == "fake_device")
    assert set(device.RATES) == set(choices["choices"])
    for name in device.RATES:
        words = ["--comm.mode", "fake_backend", "--comm.fake_device"]
        assert load([*words, name]).comm.fake_device == load([*words, name.lower()]).comm.fake_device == name
        assert find_rates(name) == find_rates(name.lower()) == device.RATES[name]


@on_cpu
def test_without_a_gpu_the_device_is_the_cpu() -> None:
    assert (device.device_type(), device.device(), device.peak_flops()) == ("cpu", torch.device("cpu"), None)


@on_cpu
def test_peak_memory_sees_an_allocation() -> None:
    size_gib = 0.25
    Path("/proc/self/clear_refs").write_text("5")  # forget the peaks of other tests
    before = device.peak_memory_gib()
    x = torch.ones(int(size_gib * device.GIB), dtype=torch.uint8)
    del x
    held = device.peak_memory_gib()
    assert before + 0.9 * size_gib < held < device.memory_total_gib()


def test_the_hosts_peak_is_told_on_a_machine_with_a_gpu_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "device_type", lambda: "cuda")
    assert 0.1 < device.host_peak_memory_gib() < 1024


@on_cpu
@pytest.mark.parametrize("name", ["memory.max", "memory.limit_in_bytes"])
def test_a_containers_limit_is_the_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "Path", lambda path: tmp_path / path.rpartition("/")[2])
    whole = device.memory_total_gib()
    for text, gib in (("max\n", whole), (f"{2**26}\n", 2**-4), (f"{2**60}\n", whole)):
        (tmp_path / name).write_text(text)
        assert device.memory_total_gib() == gib


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(
    ("groups", "ranks", "said"),
    [
        (1, 9, "NGPU = 9: each process has a GPU of its own, and there are 8 here: must be at most 8"),
        (2, 8, "each process of 2 replica groups has a GPU of its own, and there are 8 here: must be at most 4, for"),
        (9, 1, "must be at most 0: start at most 8 groups here"),
    ],
)
def test_more_processes_than_gpus_are_refused(groups: int, ranks: int, said: str) -> None:
    with pytest.raises(UserError, match=f"{said}"):
        device.share_gpus(groups, ranks)


@pytest.mark.usefixtures("eight_gpus")
def test_each_group_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device.share_gpus(2, 3) == ["0,1,2", "3,4,5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,7,6,5,4,3,2")
    assert device.share_gpus(3, 2) == ["GPU-a,GPU-b", "7,6", "5,4"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.share_gpus(3, 2) == []


@pytest.mark.usefixtures("eight_gpus")
def test_a_process_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")
    device.check_local_rank()
    monkeypatch.setenv("LOCAL_RANK", "8")
    with pytest.raises(UserError, match="LOCAL_RANK = 8: .* there are 8 here"):
        device.check_local_rank()


@pytest.mark.gpu
def test_on_a_gpu_memory_and_peak_are_the_gpus() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = device.peak_memory_gib()
    x = torch.ones(device.GIB, dtype=torch.uint8, device=device.device())
    assert before + 0.9 < device.peak_memory_gib() < device.memory_total_gib()
    del x
    assert device.device() == torch.device("cuda", 0)


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two nodes of two and three CPUs; a GPU on the second, and one whose node the firmware does not say."""
    for name, text in {
        "devices/system/node/node0/cpulist": "0-1\n",
        "devices/system/node/node1/cpulist": "2,4-5\n",
        "bus/pci/devices/0000:81:00.0/numa_node": "1\n",
        "bus/pci/devices/0000:82:00.0/numa_node": "-1\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return tmp_path


def test_the_nearest_cpus_are_those_of_the_gpu_s_node(sysfs: Path) -> None:
    assert device.nearest_cpus("0000:81:00.0", sysfs) == {2, 4, 5}


@pytest.mark.parametrize("address", ["0000:82:00.0", "0000:ff:00.0"])
def test_no_cpus_are_nearest_where_nobody_says(address: str, sysfs: Path) -> None:
    assert device.nearest_cpus(address, sysfs) == set()


def test_no_cpus_are_nearest_on_one_node(sysfs: Path) -> None:
    shutil.rmtree(sysfs / "devices/system/node/node0")
    assert device.nearest_cpus("0000:81:00.0", sysfs) == set()


def test_deterministic_kernels_fill_no_new_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each is filled with nan first, in a step of a GPU by hundreds of kernels."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        train.choose_kernels(load(["--debug.deterministic"]))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def test_a_processor_that_is_slow_in_bf16_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert device.seconds_of_product(torch.bfloat16, size=8) > 0
    for times in (0.5, 3.9):
        train.warn_of_slow_products(times)
    assert not caplog.records
    train.warn_of_slow_products(59.6)
    assert "takes 60 times as long in it as in float32; 'float32' trains faster here" in caplog.text


def test_on_a_cpu_kernels_are_deterministic_and_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sums `x[index]`'s gradient atomically else, so that no two runs would have the same bits."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(False)
        train.choose_kernels(load([]))
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
