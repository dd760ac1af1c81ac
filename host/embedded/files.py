"""Model files by kind. A name is looked up in the list of files found; it is never joined to a path."""

from __future__ import annotations

from difflib import get_close_matches
from glob import escape
from pathlib import Path

from ...errors import HooklineError

output_folders: list[Path] = [Path("output")]
"""The last one is the running prompt's."""

_folders: dict[str, list[Path]] = {}


def add_files(kind: str, folder: str | Path) -> None:
    """Another folder with files of `kind` ("loras", "checkpoints", "diffusion_models")."""
    folders = _folders.setdefault(kind, [])
    if Path(folder) not in folders:
        folders.append(Path(folder))


def _found(kind: str) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for folder in _folders.get(kind, []):
        for path in sorted(folder.rglob("*.safetensors")):
            found.setdefault(path.relative_to(folder).as_posix(), path)
    return found


def file_names(kind: str) -> list[str]:
    return sorted(_found(kind))


def file_path(kind: str, name: str) -> str:
    """Raises HooklineError for a name that is not in the list."""
    found = _found(kind)
    if name not in found:
        raise unknown_name(kind, name, list(found))
    return str(found[name])


def output_file(prefix: str, suffix: str) -> Path:
    """A new file in the run's output folder: `<prefix>_<number>_<suffix>`.

    Raises HooklineError for a prefix with a folder in it.
    """
    if not prefix or Path(prefix).name != prefix:
        raise HooklineError(f"{prefix!r}: not the beginning of a file name")
    folder = output_folders[-1]
    taken = [path.name[len(prefix) + 1 :].split("_")[0] for path in folder.glob(f"{escape(prefix)}_*")]
    number = 1 + max((int(text) for text in taken if text.isdigit()), default=0)
    return folder / f"{prefix}_{number:05}_{suffix}"


def unknown_name(kind: str, name: str, known: list[str]) -> HooklineError:
    close = get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return HooklineError(f"{kind}: there is no file {name!r}{hint}")
