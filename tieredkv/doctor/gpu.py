"""torch and its devices; what GPUDirect Storage needs."""

from __future__ import annotations

import gzip
import importlib.util
import platform
import re
from collections.abc import Iterator
from typing import Any

from tieredkv.config import HbmConfig
from tieredkv.doctor import system
from tieredkv.doctor.finding import Finding, note, ok, problem, size, warning


def gpu(hbm: HbmConfig | None) -> Iterator[Finding]:
    """What torch sees; `hbm` is the configured tier, if there is one."""
    try:
        import torch
    except Exception as error:  # a broken build raises anything
        remedy = "pip install torch, in the build for your GPU or for the CPU"
        yield problem("torch", found=f"cannot be imported: {error}", remedy=remedy)
        return
    yield ok("torch", found=f"{torch.__version__}, built for {_build(torch)}")
    driver = _driver()
    if not torch.cuda.is_available():
        yield _no_device(driver, hbm)
        return
    names = [
        f"{torch.cuda.get_device_name(i)} ({size(torch.cuda.mem_get_info(i)[0])} of"
        f" {size(torch.cuda.mem_get_info(i)[1])} free)"
        for i in range(torch.cuda.device_count())
    ]
    yield ok("gpu", found=f"{', '.join(names)}; driver {driver or 'not known'}")
    if hbm is not None:
        yield _hbm(torch, hbm)


def _build(torch: Any) -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else "the CPU"


def _driver() -> str | None:
    """Version of NVIDIA's kernel driver; None if it is not loaded."""
    text = system.text(system.PROC / "driver/nvidia/version")
    match = re.search(r"NVRM version:.*?\s(\d+\.\d[\d.]*)\s", text)
    return match[1] if match else None


def _no_device(driver: str | None, hbm: HbmConfig | None) -> Finding:
    found = "no CUDA device: hbm runs on the CPU"
    if hbm is not None and hbm.device not in ("auto", "cpu"):
        found = f"no CUDA device, but tier {hbm.label} is to be on {hbm.device!r}"
        return problem("gpu", found=found, remedy="device: auto or cpu, or see what torch lacks")
    if driver:
        return warning(
            "gpu",
            found=f"{found}, though driver {driver} is loaded",
            remedy="install a torch built for a CUDA that this driver knows (nvidia-smi shows it);"
            " see whether CUDA_VISIBLE_DEVICES hides the device",
        )
    remedy = "where there is a GPU: its driver, and a torch built for CUDA"
    slower = warning if hbm is not None and hbm.device == "auto" else note
    return slower("gpu", found=found, remedy=remedy)


def _hbm(torch: Any, hbm: HbmConfig) -> Finding:
    if hbm.device == "cpu":
        remedy = "device: auto takes the GPU"
        return note(hbm.label, found="is configured for the CPU", remedy=remedy)
    index = torch.device("cuda" if hbm.device == "auto" else hbm.device).index or 0
    if index >= torch.cuda.device_count():
        found = f"device {hbm.device!r} of {torch.cuda.device_count()}"
        return problem(hbm.label, found=found, remedy="name a device that is there, or auto")
    free, _ = torch.cuda.mem_get_info(index)
    found = f"{size(hbm.capacity)} on device {index}, which has {size(free)} free"
    if hbm.capacity > free:
        remedy = "lower its capacity, or end what else uses the device"
        return problem(hbm.label, found=found, remedy=remedy)
    return ok(hbm.label, found=found)


def gds() -> Iterator[Finding]:
    """What GPUDirect Storage needs of the machine. Nothing without kvikio; whether it works in
    the directory of a tier is tried out for the row of its access."""
    if importlib.util.find_spec("kvikio") is None:
        return  # the row of its version says so
    from tieredkv.tiers.nvme.gds import missing

    yield _kernel_support()
    lack = missing()
    if lack is not None:
        found, _, remedy = lack.rpartition(": ")
        yield note("gds", found=found, remedy=remedy)


def _kernel_support() -> Finding:
    fs = system.text(system.PROC / "driver/nvidia-fs/version").strip()
    if fs or re.search(r"^nvidia_fs ", system.text(system.PROC / "modules"), re.MULTILINE):
        return ok("gds kernel", found=f"nvidia-fs is loaded {fs}".strip())
    p2p = _p2pdma()
    found = f"nvidia-fs is not loaded; P2PDMA in this kernel: {_yes(p2p)}"
    remedy = (
        "modprobe nvidia-fs (package nvidia-gds), or with CUDA 12.8 or later a kernel with"
        " CONFIG_PCI_P2PDMA"
    )
    return note("gds kernel", found=found, remedy=remedy)


def _p2pdma() -> bool | None:
    """None where the kernel's configuration is not to be had."""
    text = system.text(system.BOOT / f"config-{platform.release()}")
    try:
        text = text or gzip.decompress((system.PROC / "config.gz").read_bytes()).decode()
    except OSError:
        return None
    return "\nCONFIG_PCI_P2PDMA=y" in text


def _yes(fact: bool | None) -> str:
    return "not known" if fact is None else "yes" if fact else "no"
