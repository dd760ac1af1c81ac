"""Model files by kind. A name is looked up in the list of files found; it is never joined to a path."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from ...errors import HooklineError

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


def unknown_name(kind: str, name: str, known: list[str]) -> HooklineError:
    close = get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return HooklineError(f"{kind}: there is no file {name!r}{hint}")
