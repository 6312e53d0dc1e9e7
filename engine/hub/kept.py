"""What the caches hold: models of the hub, and those of our own that were fetched."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bequest.engine.errors import ModelError
from bequest.engine.hub.choice import quantisation
from bequest.engine.hub.client import Hub
from bequest.engine.hub.names import HubName


@dataclass(frozen=True, slots=True)
class Kept:
    """A model that can be served by its name."""

    name: str
    num_bytes: int
    last_used: float  # seconds since 1970
    path: Path
    revision: str = ""


def kept_models(hub: Hub) -> list[Kept]:
    """Of the hub's cache: those with files that a server could read, by name."""
    if not hub.folder.is_dir():
        return []
    from huggingface_hub import scan_cache_dir

    repositories = [repo for repo in scan_cache_dir(hub.folder).repos if repo.repo_type == "model"]
    found: list[Kept] = []
    for repo in repositories:
        for revision in repo.revisions:
            sizes = {str(file.file_path.relative_to(revision.snapshot_path)): file for file in revision.files}
            shown = ", ".join(sorted(revision.refs)) or revision.commit_hash[:12]
            for name, files in _models_in(repo.repo_id, sorted(sizes)):
                num_bytes = sum(sizes[file].size_on_disk for file in files)
                found.append(Kept(name, num_bytes, repo.last_accessed, Path(revision.snapshot_path), shown))
    return sorted(found, key=lambda kept: (kept.name, kept.revision))


def _models_in(repo: str, files: list[str]) -> Iterator[tuple[str, list[str]]]:
    ggufs = [file for file in files if file.lower().endswith(".gguf")]
    for file in ggufs:
        yield str(HubName(repo, None, quantisation(file))), [file]
    if "config.json" in files and any(file.endswith(".safetensors") for file in files):
        yield repo, [file for file in files if file not in ggufs]


def remove(hub: Hub, name: HubName) -> int:
    """Deletes every revision of a repository, or one GGUF file of it. Returns the bytes that are free now."""
    if name.part is not None:
        return _remove_file(hub, name)
    from huggingface_hub import scan_cache_dir

    cache = scan_cache_dir(hub.folder) if hub.folder.is_dir() else None
    repositories = [repo for repo in cache.repos if repo.repo_type == "model"] if cache is not None else []
    repo = next((repo for repo in repositories if repo.repo_id == name.repo), None)
    if cache is None or repo is None:
        raise ModelError(f"{name} is not in {hub.folder}; `bequest list` shows what is")
    wanted = [
        revision.commit_hash
        for revision in repo.revisions
        if name.revision is None or name.revision in revision.refs or revision.commit_hash.startswith(name.revision)
    ]
    if not wanted:
        raise ModelError(f"{name.repo} is in {hub.folder} without a revision {name.revision}")
    strategy = cache.delete_revisions(*wanted)
    strategy.execute()
    return int(strategy.expected_freed_size)


def _remove_file(hub: Hub, name: HubName) -> int:
    wanted = [kept for kept in kept_models(hub) if kept.name.lower() == str(name).lower()]
    if not wanted:
        raise ModelError(f"{name} is not in {hub.folder}; `bequest list` shows what is")
    freed = 0
    for kept in wanted:
        for link in kept.path.rglob("*.gguf"):
            if quantisation(link.name).lower() == (name.part or "").lower():
                blob = link.resolve()
                link.unlink()
                if blob.exists():
                    freed += blob.stat().st_size
                    blob.unlink()
    return freed


def size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def remove_directory(directory: Path) -> int:
    freed = size_of(directory)
    shutil.rmtree(directory)
    return freed
