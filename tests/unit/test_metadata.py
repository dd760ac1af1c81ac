"""pyproject.toml: what the registry's validation asks for, and what an installed package needs to find."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hookline

ROOT = Path(hookline.__file__).parent


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_registry_takes_it(settings: dict[str, Any]) -> None:
    """The rules of docs.comfy.org and of `comfy node validate`."""
    project, comfy = settings["project"], settings["tool"]["comfy"]
    assert re.fullmatch(r"[a-z][a-z0-9._-]{0,99}", project["name"]) and "comfyui" not in project["name"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[a-zA-Z0-9]+)?", project["version"])
    assert isinstance(project["license"], dict) and project["license"].keys() <= {"text", "file"}
    assert project["urls"]["Repository"].startswith("https://")
    assert project["description"] and project["requires-python"]
    systems = [c.removeprefix("Operating System :: ") for c in project["classifiers"]]
    assert systems and all(s.startswith(("Microsoft", "POSIX", "MacOS", "OS Independent")) for s in systems)
    assert comfy["PublisherId"] and comfy["DisplayName"]
    assert re.fullmatch(r"(==|>=|<=|~=|>|<)\d+\.\d+\.\d+", comfy["requires-comfyui"])
    # The pages in web/ are registered by WEB_DIRECTORY; both together would load every script twice.
    assert "web" not in comfy


def test_no_exec_no_eval_no_two_statements_in_a_line() -> None:
    """The registry's own check."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "S102,S307,E702", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_changelog_is_about_this_version(settings: dict[str, Any]) -> None:
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading and heading[1] == settings["project"]["version"]


def test_an_installed_package_has_all_modules_and_data(settings: dict[str, Any]) -> None:
    tools = settings["tool"]["setuptools"]
    tops = [top for top in ROOT.iterdir() if top.name[0] != "." and top.name not in ("tests", "build")]
    folders = {path.parent.relative_to(ROOT) for top in tops for path in top.rglob("__init__.py")}
    assert set(tools["packages"]) == {"hookline", *(".".join(("hookline", *folder.parts)) for folder in folders)}
    installed = {
        path
        for package, patterns in tools["package-data"].items()
        for pattern in patterns
        for path in ROOT.joinpath(*package.split(".")[1:]).glob(pattern)
    }
    data = [p for folder in ("web", "example_workflows", "assets") for p in (ROOT / folder).rglob("*") if p.is_file()]
    data = [path for path in data if path.suffix != ".py" and "__pycache__" not in path.parts]
    assert [str(path.relative_to(ROOT)) for path in data if path not in installed] == []
