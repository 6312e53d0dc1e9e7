"""Fetches models from the hub through its own client library, which resumes what broke off and keeps the cache."""

from __future__ import annotations

import errno
import glob
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bequest.engine.errors import ModelError
from bequest.engine.hub.choice import Choice, choose
from bequest.engine.hub.names import HubName
from bequest.engine.models.any_config import read_config
from bequest.engine.models.impl import AUTO, Implementation
from bequest.engine.models.look import look_at_config

log = logging.getLogger("bequest.start")
_SPARE = 1 << 28  # bytes of a disk that are not ours to fill
_HTTP_LIBRARIES = ("httpx", "httpx2")  # that versions of the client are built on


@dataclass(frozen=True, slots=True)
class Hub:
    """Where models come from and where they are kept; None: as HF_ENDPOINT, HF_HOME and HF_HUB_CACHE say."""

    endpoint: str | None = None
    cache: Path | None = None

    @property
    def address(self) -> str:
        from huggingface_hub import constants

        return self.endpoint or str(constants.ENDPOINT)

    @property
    def folder(self) -> Path:
        from huggingface_hub import constants

        return self.cache or Path(constants.HF_HUB_CACHE)

    def fetch(self, name: HubName, impl: Implementation = AUTO) -> Path:
        """The model's directory, or its GGUF file; fetched where it is not here yet. Raises ModelError."""
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return self._kept(name, "HF_HUB_OFFLINE is set, so the hub is not asked")
        with _told(self, name):
            files = self._files(name)
            if files is None:
                return self._kept(name, f"{self.address} cannot be reached")
            choice = choose(name, list(files), with_code=impl.trust_remote_code)
            if choice.descriptions:
                _check(self._download(name, choice.descriptions), impl)
            self._make_room(name, choice, files)
            return _path_in(self._download(name, [*choice.descriptions, *choice.weights]), choice)

    def _files(self, name: HubName) -> dict[str, int] | None:
        """The repository's files and their sizes; None where the hub does not answer."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        try:
            info = HfApi(endpoint=self.endpoint).model_info(name.repo, revision=name.revision, files_metadata=True)
        except HfHubHTTPError as error:
            if error.response is not None and error.response.status_code < 500:
                raise
            log.warning("%s: %s", self.address, str(error).splitlines()[0])
            return None
        except OSError:
            return None
        except Exception as error:
            if not _is_transport(error):
                raise
            return None
        return {file.rfilename: file.size or 0 for file in info.siblings or ()}

    def _kept(self, name: HubName, why: str) -> Path:
        """What an earlier run has fetched."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            found = snapshot_download(
                name.repo, revision=name.revision, cache_dir=self.folder, local_files_only=True, allow_patterns=[]
            )
        except (LocalEntryNotFoundError, ValueError):
            raise ModelError(f"{name}: {why}, and {self.folder} does not hold it; {_tried(self, name)}") from None
        directory = Path(found)
        files = [str(file.relative_to(directory)) for file in sorted(directory.rglob("*")) if file.is_file()]
        try:
            path = _path_in(directory, choose(name, files))
        except ModelError as error:
            raise ModelError(f"{error} (in {directory}; {why})") from None
        log.info("%s: %s; the kept one is served", name, why)
        return path

    def _download(self, name: HubName, files: Sequence[str]) -> Path:
        from huggingface_hub import snapshot_download

        patterns = [glob.escape(file) for file in files]
        return Path(
            snapshot_download(
                name.repo,
                revision=name.revision,
                cache_dir=self.folder,
                endpoint=self.endpoint,
                allow_patterns=patterns,
            )
        )

    def _make_room(self, name: HubName, choice: Choice, files: dict[str, int]) -> None:
        """Says what will be fetched, and refuses what the disk cannot hold before it is full."""
        missing = self._missing(name, choice)
        needed = sum(files[file] for file in missing)
        if not missing:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if needed + _SPARE > free:
            raise ModelError(
                f"{name} needs {_gb(needed)} more, and {self.folder} has {_gb(free)} free: make room there "
                "(`bequest list` shows what it holds, `bequest rm` removes it), or name another folder with HF_HOME"
            )
        log.info("fetching %s: %d files, %s, to %s", name, len(missing), _gb(needed), self.folder)

    def _missing(self, name: HubName, choice: Choice) -> list[str]:
        from huggingface_hub import try_to_load_from_cache

        def is_here(file: str) -> bool:
            found = try_to_load_from_cache(name.repo, file, cache_dir=self.folder, revision=name.revision)
            return isinstance(found, str)

        return [file for file in choice.weights if not is_here(file)]


def _check(directory: Path, impl: Implementation) -> None:
    """Whether its config can be served is known before its weights are fetched."""
    if look_at_config(directory, impl) is None:
        from bequest.engine.models.transformers_impl.library import find_class

        find_class(directory, read_config(directory), trust_remote_code=impl.trust_remote_code)
    if not (directory / "tokenizer.json").exists():
        raise ModelError(
            f"{directory} has no tokenizer.json. If the model has another kind of tokenizer, transformers can write "
            "one: AutoTokenizer.from_pretrained(NAME).save_pretrained(directory)"
        )


def _path_in(directory: Path, choice: Choice) -> Path:
    return directory if choice.gguf is None else directory / choice.gguf


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"


def _tried(hub: Hub, name: HubName) -> str:
    return f"tried: the path {os.path.abspath(name.repo)}, {hub.folder}, {hub.address}/{name.repo}"


def _is_transport(error: Exception) -> bool:
    """Failures of the connection, of whichever HTTP library the client was built on."""
    return any(kind.__name__ in ("TransportError", "RequestException", "ConnectionError") for kind in type(error).mro())


@contextmanager
def _told(hub: Hub, name: HubName) -> Iterator[None]:
    """The library's errors in our words; its bars where a person watches."""
    from huggingface_hub import errors
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if not sys.stderr.isatty():
        disable_progress_bars()
    for library in _HTTP_LIBRARIES:  # a line for each request would drown ours
        logging.getLogger(library).setLevel(logging.WARNING)
    page = f"{hub.address}/{name.repo}"
    try:
        yield
    except errors.GatedRepoError:
        raise ModelError(
            f"{name.repo} asks for a licence: accept it on {page}, make a token under {hub.address}/settings/tokens, "
            "and give it as HF_TOKEN in the environment"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{name.repo} has no revision {name.revision} ({page}/tree/{name.revision})") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{name.repo}: no such model, or it is private and needs a token (HF_TOKEN); {_tried(hub, name)}"
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "an error"
        hint = "; the token in HF_TOKEN or of `hf auth login` is not accepted" if status in (401, 403) else ""
        raise ModelError(f"{page} answered {status}{hint}") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(f"{hub.folder} is full: make room, or name another folder with HF_HOME") from None
        raise ModelError(f"{name}: the download broke off ({error}); the same command goes on from there") from None
    except Exception as error:
        if not _is_transport(error):
            raise
        reason = str(error) or type(error).__name__
        raise ModelError(f"{name}: the download broke off ({reason}); the same command goes on from there") from None
