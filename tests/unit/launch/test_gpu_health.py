"""What NVIDIA's tools say of a node's GPUs, with stand-ins that print what the real ones do."""

import json
import sys
import time
from pathlib import Path

import pytest

from torchtitan_graph.launch import gpu_health
from torchtitan_graph.launch.gpu_health import Health, active_links, read_gpus

# As nvidia-smi of driver 550 prints them on an H100, and of driver 470 on a V100, which has no rows to remap.
H100 = {
    "index": "0",
    "gpu_bus_id": "00000000:3B:00.0",
    "ecc.errors.uncorrected.volatile.total": "0",
    "retired_pages.pending": "[N/A]",
    "temperature.gpu": "34",
    "clocks_event_reasons.hw_slowdown": "Not Active",
    "clocks_event_reasons.hw_thermal_slowdown": "Not Active",
    "clocks_event_reasons.hw_power_brake_slowdown": "Not Active",
    "remapped_rows.pending": "No",
    "remapped_rows.failure": "No",
}
V100 = {name.replace("_event_", "_throttle_"): value for name, value in H100.items()} | {
    "retired_pages.pending": "No",
    "remapped_rows.pending": "[Not Supported]",
    "remapped_rows.failure": "[Not Supported]",
}
NVLINK = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-4f495419)\n" + "".join(
    f"\t Link {n}: 26.562 GB/s\n" for n in range(18)
)
WELL = '{"DCGM Diagnostic": {"test_categories": []}}'

SMI = """
import sys
words = sys.argv[1].partition("=")[2].split(",")
if sys.argv[1] == "nvlink":
    print(NVLINK)
for field in words:
    if words != [""] and field not in GPUS[0]:
        print(f'Field "{field}" is not a valid field to query.')
        sys.exit(2)
for gpu in GPUS if words != [""] else []:
    print(", ".join(gpu[field] for field in words))
sys.exit(CODE)
"""


def stand_in(folder: Path, name: str, code: str) -> None:
    path = folder / name
    path.write_text(f"#!{sys.executable} -ES\n{code}")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is alone on PATH, with the tools of a node whose one GPU, an H100, is well."""
    monkeypatch.setenv("PATH", str(tmp_path))
    smi(tmp_path, [H100])
    stand_in(tmp_path, "dmesg", "print('[    0.000000] Linux version 6.8.0')")
    stand_in(tmp_path, "dcgmi", f"print({WELL!r})")
    return tmp_path


def smi(folder: Path, gpus: list[dict[str, str]], code: int = 0) -> None:
    stand_in(folder, "nvidia-smi", f"GPUS, NVLINK, CODE = {gpus!r}, {NVLINK!r}, {code}\n{SMI}")


@pytest.mark.parametrize("gpu", [H100, V100])
def test_nothing_is_wrong_with_gpus_that_are_well(gpu: dict[str, str], tools: Path) -> None:
    smi(tools, [gpu, gpu | {"index": "1"}], code=14)  # 14: the infoROM of one is corrupted, a warning
    assert read_gpus() == Health([], {"0": 18}, [])


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        (
            "ecc.errors.uncorrected.volatile.total",
            "2",
            "GPU 1: ecc.errors.uncorrected.volatile.total is 2: reset the GPU",
        ),
        ("retired_pages.pending", "Yes", "GPU 1: retired_pages.pending is Yes: reboot the node"),
        ("temperature.gpu", "91", "GPU 1: temperature.gpu is 91: look at the node's cooling"),
        ("clocks_event_reasons.hw_slowdown", "Active", "hw_slowdown is Active: the GPU runs slower"),
        ("clocks_event_reasons.hw_thermal_slowdown", "Active", "hw_thermal_slowdown is Active: the GPU is too hot"),
        (
            "clocks_event_reasons.hw_power_brake_slowdown",
            "Active",
            "hw_power_brake_slowdown is Active: the node's power",
        ),
        ("remapped_rows.pending", "Yes", "GPU 00000000:3C:00.0: remapped_rows.pending is Yes: reset the GPU"),
        ("remapped_rows.failure", "1", "GPU 00000000:3C:00.0: remapped_rows.failure is 1: replace the GPU"),
        ("temperature.gpu", "[GPU requires reset]", "GPU 1: nvidia-smi says: GPU requires reset"),
    ],
)
@pytest.mark.parametrize("driver", ["550", "470"])
def test_a_bad_field_is_named(driver: str, field: str, value: str, said: str, tools: Path) -> None:
    gpu = H100
    if driver == "470":
        gpu, field = V100, field.replace("_event_", "_throttle_")
    smi(tools, [gpu, gpu | {"index": "1", "gpu_bus_id": "00000000:3C:00.0", field: value}])
    (problem,) = read_gpus().problems
    assert said in problem


@pytest.mark.parametrize("value", ["[N/A]", "[Not Supported]", "[Unknown Error]", "N/A", ""])
def test_a_field_that_the_gpu_does_not_have_is_no_problem(value: str, tools: Path) -> None:
    smi(tools, [{name: value for name in H100} | {"index": "0"}])
    assert read_gpus() == Health([], {"0": 18}, [])


def test_a_driver_that_does_not_know_a_field_is_asked_for_the_others(tools: Path) -> None:
    known = {name: value for name, value in H100.items() if "power_brake" not in name}
    smi(tools, [known | {"temperature.gpu": "91"}])
    assert len(read_gpus().problems) == 1


def test_links_that_are_not_active_are_counted() -> None:
    text = NVLINK.replace("Link 3: 26.562 GB/s", "Link 3: <inactive>").replace("Link 4: 26.562", "Link 4: 0.000")
    lost = "GPU 1: NVIDIA H100\nNVML: Unable to retrieve Nvlink information as all links are inActive\n"
    assert active_links(text + lost) == {"0": 16, "1": 0}


LOG = """[{old:12.6f}] NVRM: Xid (PCI:0000:3b:00): 79, pid=77, name=python, GPU has fallen off the bus.
[{new:12.6f}] NVRM: Xid (PCI:0000:{gpu}:00): {xid}, pid='<unknown>', name=<unknown>, what it was
[{new:12.6f}] NVRM: Xid (PCI:0000:{gpu}:00): {xid}, pid='<unknown>', name=<unknown>, once more
"""


@pytest.mark.parametrize("log", ["dmesg", "journalctl"])
def test_a_serious_xid_of_the_last_hour_is_named_once(log: str) -> None:
    """An error of the program (31), and one of two hours ago, are not."""
    now = 10_000.0
    said = ["GPU at 0000:5d:00: Xid 119 in the last hour: its system processor does not answer"]
    for xid, problems in ((119, said), (31, [])):
        text = LOG.format(old=now - 7200, new=now - 60, gpu="5d", xid=xid)
        text = text.replace("] NVRM", "] node7 kernel: NVRM") if log == "journalctl" else text
        assert [problem.partition(";")[0] for problem in gpu_health._xids(text, now)] == problems


def test_the_kernel_s_log_is_read(tools: Path) -> None:
    text = LOG.format(old=0, new=time.monotonic(), gpu="5d", xid=79)
    stand_in(tools, "dmesg", "import sys; sys.exit('dmesg: read kernel buffer failed: Operation not permitted')")
    stand_in(tools, "journalctl", f"print({text!r})")
    assert any("GPU at 0000:5d:00: Xid 79" in problem for problem in read_gpus().problems)


def failed(version: int, test: str, **warning: object) -> str:
    """Return what dcgmi diag -j of DCGM 3 or 4 prints of one test that fails on GPU 2."""
    if version == 3:
        result = {"gpu_ids": "2", "status": "Fail", "warnings": [warning] if len(warning) > 1 else warning["warning"]}
    else:
        result = {"entity_group": "GPU", "entity_group_id": 1, "entity_id": 2, "status": "Fail", "warnings": [warning]}
    tests = [None, {"name": "NVML Library", "results": [{"gpu_ids": "2", "status": "PASS"}]}]
    table = {"test_categories": [{"category": "Deployment", "tests": [*tests, {"name": test, "results": [result]}]}]}
    document = {"DCGM GPU Diagnostic": table} if version == 3 else {"DCGM Diagnostic": table, "metadata": {}}
    return "Successfully ran diagnostic for group.\n" + json.dumps(document, indent=1)


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        (
            failed(4, "software", warning="Row remap failure", error_id=83, error_severity=2),
            "software failed: Row remap",
        ),
        (failed(4, "software", warning="Persistence mode is disabled", error_id=29, error_severity=5), ""),
        (failed(3, "Inforom", warning="corrupt", error_id=31, error_severity=6), "Inforom failed: corrupt"),
        (failed(3, "Page Retirement/Row Remap", warning="pending"), "Page Retirement/Row Remap failed: pending"),
        (failed(3, "Persistence Mode", warning="is disabled"), ""),
    ],
)
def test_what_dcgm_finds_of_the_hardware_is_named_and_settings_are_not(printed: str, said: str, tools: Path) -> None:
    stand_in(tools, "dcgmi", f"print({printed!r}); import sys; sys.exit(226)")
    found = read_gpus()
    assert not found.not_read and len(found.problems) == bool(said)
    assert all(f"GPU 2: dcgmi diag: {said}" in problem for problem in found.problems)


def test_a_tool_that_does_not_answer_is_ended(tools: Path) -> None:
    stand_in(tools, "dcgmi", "import time; time.sleep(60)")
    with pytest.raises(gpu_health._NotReadError, match="no answer in 15 s"):
        gpu_health._output(("dcgmi",), deadline=time.monotonic() + 0.05)


def test_tools_that_are_missing_or_fail_are_no_problem_of_the_node(tools: Path) -> None:
    failing = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    stand_in(tools, "nvidia-smi", f"import sys; print({failing!r}); sys.exit(9)")
    stand_in(tools, "dcgmi", "print('Error: unable to establish a connection to the specified host: localhost')")
    (tools / "dmesg").unlink()
    found = read_gpus()
    assert found.problems == [] and found.links == {}
    assert found.not_read == [
        f"nvidia-smi --query-gpu ({failing})",
        f"nvidia-smi --query-remapped-rows ({failing})",
        "Xid errors (dmesg: not installed; journalctl: not installed)",
        "dcgmi diag (Error: unable to establish a connection to the specified host: localhost)",
        f"nvidia-smi nvlink ({failing})",
    ]


@pytest.mark.parametrize(
    "printed", ["", "{", "no {thing}", "[1]", '{"a": 1}', '{"DCGM Diagnostic": {"test_categories": 1}}']
)
def test_an_answer_of_another_form_is_not_read(printed: str, tools: Path) -> None:
    for name in ("nvidia-smi", "dcgmi", "dmesg"):
        stand_in(tools, name, f"print({printed!r})")
    found = read_gpus()
    assert found.problems == [] and len(found.not_read) == 5
