"""Kernels in caches that are damaged, full, read-only or oddly named: compiled again, or run operator by operator."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from encore import cached_files
from encore.cached_files import read_record, write_record
from encore.lower import header, kernels, torch_private
from encore.lower.extension import LoweringError
from encore.lower.kernels import KernelStore
from encore.schedule import Fused, fuse
from encore.schedule.kernel import Kernel
from support.captured_graphs import captured
from support.kernel_caches import with_header
from support.rounding import assert_close

TESTS = Path(__file__).parents[1]


def wave(x: Tensor) -> Tensor:
    return (x * 2).sin() + 1


def wave_kernel() -> Kernel:
    torch._dynamo.reset()
    schedule = fuse(captured(wave, torch.randn(3, 5, requires_grad=True)).plan.schedule)
    return [action for action in schedule.forward if isinstance(action, Fused)][-1].kernel


def check_kernel(store: KernelStore, kernel: Kernel, *, fresh: int) -> None:
    """It is there, compiled now or before, and right."""
    made = store.compile([kernel])
    assert dict(made.failed) == {}
    assert made.fresh == fresh
    x = torch.randn(3, 5)
    assert_close(made.compiled[kernel.key].call([x])[-1], wave(x))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "kernels"
    made.mkdir(0o700)
    return made


# -- damaged files ---------------------------------------------------------------------------------------------------


def replaced(path: Path, content: bytes) -> None:
    """As another file of the same name: whoever has loaded the old one keeps it."""
    path.unlink()
    path.write_bytes(content)
    path.chmod(0o600)


def the(folder: Path, kind: str) -> Path:
    (found,) = folder.glob(f"*.{kind}")
    return found


def changed(**fields: Any) -> Callable[[Path], None]:
    """A record that is whole, with other fields."""

    def change(folder: Path) -> None:
        write_record(the(folder, "json"), {**read_record(the(folder, "json")), **fields})

    return change


def cut(kind: str, share: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = the(folder, kind).read_bytes()
        replaced(the(folder, kind), content[: int(len(content) * share)])

    return change


def flipped(folder: Path) -> None:
    content = bytearray(the(folder, "so").read_bytes())
    content[len(content) // 2] ^= 1
    replaced(the(folder, "so"), bytes(content))


def half_a_source(folder: Path) -> None:
    source = read_record(the(folder, "json"))["source"]
    changed(source=source[: len(source) // 2])(folder)


def out_of_the_folder(folder: Path) -> None:
    """A record that names a library beside the folder, which is whole."""
    library = the(folder, "so")
    (folder.parent / "elsewhere").mkdir()
    library.rename(folder.parent / "elsewhere" / library.name)
    changed(extension=f"../elsewhere/{read_record(the(folder, 'json'))['extension']}")(folder)


def linked(folder: Path) -> None:
    """A library that is a link to one somewhere else."""
    library = the(folder, "so")
    (folder.parent / "linked").mkdir()
    library.rename(folder.parent / "linked" / library.name)
    library.symlink_to(folder.parent / "linked" / library.name)


def of_another_kernel(folder: Path) -> None:
    changed(key="0" * 24)(folder)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "an empty library": cut("so", 0),
    "a library cut off early": cut("so", 0.1),
    "half a library": cut("so", 0.5),
    "a library cut off late": cut("so", 0.95),
    "a flipped bit in a library": flipped,
    "no library": lambda folder: the(folder, "so").unlink(),
    "a library out of the folder": out_of_the_folder,
    "a linked library": linked,
    "an empty record": cut("json", 0),
    "half a record": cut("json", 0.5),
    "half a source": half_a_source,
    "a source that fails": changed(source="raise SystemError('not today')"),
    "a source without a call": changed(source="pass"),
    "a record of another kernel": of_another_kernel,
    "a negative workspace": changed(workspace=-1),
    "an infinite workspace": changed(workspace=float("inf")),
    "a workspace in words": changed(workspace="much"),
    "an absolute path": changed(extension="/etc/passwd"),
    "functions that are none": changed(functions=[1]),
    "an unknown field": changed(more=1),
}

LOAD = """
    import sys
    from pathlib import Path
    from encore.lower.kernels import KernelStore
    from test_kernel_cache import check_kernel, wave_kernel

    kernel = wave_kernel()
    for number, folder in enumerate(sys.argv[1:]):
        print(folder, flush=True)
        assert KernelStore(Path(folder)).workspace(kernel) is None
        if number % 10 == 2:
            check_kernel(KernelStore(Path(folder)), kernel, fresh=1)
            check_kernel(KernelStore(Path(folder)), kernel, fresh=0)
"""


def run_apart(program: str, *arguments: str, **environment: str) -> str:
    """Run a program in a process of its own, which may crash; what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        capture_output=True, check=False,
        env={
            **os.environ, "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(Path(__file__).parent), *filter(None, sys.path)]),
            **environment,
        },
    )  # fmt: skip
    printed = done.stdout.decode(errors="replace")
    assert done.returncode == 0, f"{done.returncode} after {printed[-500:]}\n{done.stderr.decode()[-3000:]}"
    return printed


def test_damaged_files_are_compiled_again_and_never_loaded(tmp_path: Path, folder: Path) -> None:
    """In a process of its own: a library that was cut off is mapped without an error, and its reader is killed."""
    kernel = wave_kernel()
    check_kernel(KernelStore(folder), kernel, fresh=1)
    damaged = []
    for number, damage in enumerate(DAMAGES.values()):
        copy = tmp_path / f"{number}" / "kernels"
        shutil.copytree(folder, copy)
        copy.chmod(0o700)
        damage(copy)
        damaged.append(str(copy))
    run_apart(LOAD, *damaged)


def test_code_that_another_user_could_have_written_is_not_executed(tmp_path: Path, folder: Path) -> None:
    kernel = wave_kernel()
    check_kernel(KernelStore(folder), kernel, fresh=1)
    trace = tmp_path / "executed"
    changed(source=f"open({str(trace)!r}, 'w')")(folder)
    the(folder, "json").chmod(0o666)
    with pytest.warns(UserWarning, match="is not trusted, since other users may write to"):
        check_kernel(KernelStore(folder), kernel, fresh=1)
    assert not trace.exists()
    check_kernel(KernelStore(folder), kernel, fresh=0)


# -- places that take no files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
def test_a_cache_that_takes_no_files(folder: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, content: bytes) -> NoReturn:
        raise OSError(code, os.strerror(code))

    kernel = wave_kernel()
    writable = folder.parent / "writable"
    writable.mkdir(0o700)
    check_kernel(KernelStore(writable), kernel, fresh=1)  # and the header, which is cached in a folder of its own
    monkeypatch.setattr(kernels, "write_cached", refuse)
    monkeypatch.setattr(cached_files, "write_cached", refuse)
    cached_files.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="compiled code cannot be written to") as caught:
        check_kernel(KernelStore(folder), kernel, fresh=1)
    assert len(caught) == 1
    assert os.strerror(code) in str(caught[0].message)
    assert list(folder.iterdir()) == []


def test_no_place_for_sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    kernel = wave_kernel()
    monkeypatch.setattr(kernels, "private_directory", full)
    made = KernelStore(folder).compile([kernel])
    assert dict(made.compiled) == {}
    assert "No space left on device" in made.failed[kernel.key]


def test_a_library_that_cannot_be_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a file system that is mounted with `noexec`."""

    def forbid(extension: object) -> NoReturn:
        raise ImportError("failed to map segment from shared object: Operation not permitted")

    kernel = wave_kernel()
    monkeypatch.setattr(kernels, "_load_extension", forbid)
    made = KernelStore(folder).compile([kernel])
    assert dict(made.compiled) == {}
    assert "Operation not permitted" in made.failed[kernel.key]
    assert made.fresh == 0


TRAIN = """
    import json, sys, warnings
    import torch
    from torch import nn
    import encore

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Hardtanh(), nn.Linear(6, 6), nn.Softmax(-1))
    x = torch.randn(4, 6)
    model(x).sin().sum().backward()
    want = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        encore.compile(model, lowering="fused")(x).sin().sum().backward()
        encore.nn.LSTM(3, 4, stash="lean")(torch.randn(5, 2, 3))[0].sum().backward()
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=3e-4, atol=3e-4)  # half of the digits
    print(json.dumps([str(entry.message) for entry in caught if "encore" in str(entry.message)]))
"""


def warnings_of_training(cache: str | Path, **environment: str) -> list[str]:
    """Train a little in another process, with right gradients; what Encore warned of."""
    printed = run_apart(TRAIN, ENCORE_CACHE_DIR=str(cache), **environment)
    found: list[str] = json.loads(printed.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["it's", 'a "b" c', "dos\\path", "köln 東京", "bytes\udcff", "$HOME;*&", "-o"])
def test_a_cache_of_any_name(tmp_path: Path, name: str) -> None:
    cache = with_header(tmp_path / name)
    assert warnings_of_training(cache) == []
    assert list(cache.glob("kernels-*/*.so"))
    assert list(cache.glob("native/*.so"))


@pytest.mark.slow
def test_a_cache_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    (said,) = warnings_of_training(tmp_path / "cache")
    assert "there can be no cache" in said


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path) -> None:
    """A file system of 100 KiB for the cache."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k,mode=700", "tmpfs", disk], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        said = warnings_of_training(disk)
    finally:
        subprocess.run(["umount", disk], check=True)
    assert said
    assert all("cannot be written to" in one for one in said)


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """The compiler is killed by it: operators run one by one."""
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n" + textwrap.dedent(TRAIN)
    printed = run_apart(limited, ENCORE_CACHE_DIR=str(tmp_path))
    assert "run one by one" in printed


# -- the header ------------------------------------------------------------------------------------------------------

SMALL_HEADER = "#define ANSWER 42\n"


@pytest.fixture
def small_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for a header that compiles in no time."""
    monkeypatch.setenv("ENCORE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(header, "HEADER", SMALL_HEADER)
    return tmp_path / "cache"


def compiled_header(cache: Path) -> Path:
    (found,) = cache.glob("header-*/kernels.h.gch")
    return found


def test_a_header_is_compiled_once(small_header: Path) -> None:
    first = header.kernel_header()
    assert first.read_text() == SMALL_HEADER
    written = compiled_header(small_header).stat().st_mtime_ns
    header._checked.clear()  # as another process
    assert header.kernel_header() == first
    assert compiled_header(small_header).stat().st_mtime_ns == written


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
@pytest.mark.parametrize("name", ["kernels.h.gch", "kernels.h", "kernels.h.json"])
def test_a_header_that_was_cut_off_is_compiled_again(small_header: Path, name: str, share: float) -> None:
    path = header.kernel_header().with_name(name)
    content = path.read_bytes()
    replaced(path, content[: int(len(content) * share)])
    header._checked.clear()
    assert header.kernel_header() == path.with_name("kernels.h")
    record = read_record(path.with_name("kernels.h.json"))
    assert sorted(record) == ["kernels.h", "kernels.h.gch"]
    for made, sha256 in record.items():
        assert hashlib.sha256(path.with_name(made).read_bytes()).hexdigest() == sha256
    assert path.with_name("kernels.h").read_text() == SMALL_HEADER
    assert path.with_name("kernels.h.gch").stat().st_size > 1 << 20


def test_without_place_for_a_compiled_header_kernels_read_its_text(
    small_header: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(made: Path, path: Path) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(header, "take_place", full)
    cached_files.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="cannot be written to"):
        text = header.kernel_header()
    assert text.read_text() == SMALL_HEADER
    assert not text.with_name("kernels.h.gch").exists()


def test_no_place_for_the_header_at_all(small_header: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(header, "_compile", lambda folder: False)
    monkeypatch.setattr(header, "private_directory", full)
    with pytest.raises(LoweringError, match="No space left on device"):
        header.kernel_header()


# -- Inductor's own files --------------------------------------------------------------------------------------------


def test_inductor_executes_nothing_from_the_directory_it_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    kernel = wave_kernel()
    assert "def call" in torch_private.module_source(dataclasses.replace(kernel))
    assert list(tmp_path.rglob("*.py")) == []
