"""The wheel, installed into an environment of its own, works from any folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from omegaconf import OmegaConf

REPOSITORY = Path(__file__).parents[2]
FIND = "import importlib.util; print(importlib.util.find_spec('lightning_5d').origin)"  # without the seconds of its imports
SOURCES = ("lightning_5d", "conf", "recipes", "pyproject.toml", "README.md", "LICENSE")


def run(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=cwd, env=environment, timeout=300, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ).stdout  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The `bin` folder of a fresh environment that holds the wheel and borrows the dependencies of this one."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "source").mkdir()
    for name in SOURCES:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, folder / "source" / name, symlinks=True)
        else:
            shutil.copy(REPOSITORY / name, folder / "source" / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(folder / "source"), cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"), cwd=folder)
    python = folder / "venv" / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        str(wheel),
        cwd=folder,
    )
    # A line in a .pth file adds a folder without reading the .pth files there, so an editable install stays out.
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_the_installed_command_finds_its_configuration_from_any_folder(installed, tmp_path):
    assert "tokenize" in run(str(installed / "fived"), "--help", cwd=tmp_path)
    where = run(str(installed / "python"), "-c", FIND, cwd=tmp_path)
    assert Path(where.strip().splitlines()[-1]).is_relative_to(installed.parent)
    shown = run(str(installed / "fived"), "train", "--cfg", "job", "recipe=python_docs_zero1", cwd=tmp_path)
    assert OmegaConf.create(shown).data._target_ == "lightning_5d.data.PythonDocs"


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_the_wheel_holds_types_configuration_and_recipes_once(installed):
    (site,) = (installed.parent / "lib").glob("python*/site-packages")
    package = site / "lightning_5d"
    assert (package / "py.typed").is_file()
    shipped = {str(file.relative_to(package / "conf")) for file in (package / "conf").rglob("*.yaml")}
    here = {
        str(file.relative_to(REPOSITORY / "conf"))
        for folder, _, names in os.walk(REPOSITORY / "conf", followlinks=True)
        for file in (Path(folder) / name for name in names)
        if file.suffix == ".yaml"
    }
    assert shipped == here
    assert "recipe/python_docs_zero1.yaml" in shipped
