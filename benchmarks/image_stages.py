"""Where the milliseconds of an image's first token are: on the host by stamps, on the device by a profile.

    python -m benchmarks.image_stages [--rounds 12] [--side 1024] [--profile FILE] [--crowd 64] [--at-once 32]

The model, the images and the texts are those of benchmarks/gpu_images.py, one request at a time, the client in another
process. Stations are printed with the median of milliseconds since the first byte came, and since the station before.
With --profile three more images and three more texts are computed under torch's profiler: the kernels of each are
printed by name, and FILE is the trace (which changes the times of the host, and of the device a little). With --crowd
so many images are asked for as well, --at-once of them at a time: their rate, and with --profile their kernels. Sizes
of steps and their times on the device are printed at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.gpu_images import Asker, picture, save
from benchmarks.stations import STAMPS, run_stamped, served, wrap

_FIRST = 4  # images and texts that nobody measures
_PROFILED = 3
_TOWER, _BYTES_IN, _COMPUTED = "tower", "bytes in", "computed"
_ANSWER = 32  # tokens that each request of a crowd asks for
# Milliseconds of steps on the device, by images that were looked at and hundreds of tokens.
_STEPS: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
Way = dict[str, int]  # the first stamp of each station, ns


def wrap_way_in() -> None:
    """What stations.py does not know: from a body to a request, and from pixels to rows."""
    from bequest.engine.models.towers.tower import Tower
    from bequest.engine.runner.cuda_overlay import FixedPlaces
    from bequest.engine.runner.images import SeenImages
    from bequest.engine.scheduling.scheduler import Scheduler
    from bequest.engine.state.contents import ContentKey
    from bequest.engine.vision import grid
    from bequest.server.asks import call, chats, images
    from bequest.server.stores.images import ImageStore
    from bequest.server.transport import intake

    apply = Scheduler.apply

    def timed(self: Scheduler, launch: Any, result: Any, now: float) -> Any:
        plan = launch.plan
        images = 0 if plan.images is None else len(plan.images.looked_at)
        _STEPS[images, -(-plan.num_tokens // 100)].append(1e3 * result.device_seconds)
        return apply(self, launch, result, now)

    Scheduler.apply = timed  # type: ignore[method-assign]
    wrap(intake, "_whole", "read body", "body is whole")
    wrap(intake, "structure_of", "count", "counted")
    wrap(intake, "parse_large_object", "parse", "parsed")
    wrap(call, "read_body", None, "body typed")
    wrap(chats, "read_messages", "messages", "messages read")
    wrap(chats, "rendered_chat", None, "chat tokenised")
    wrap(chats, "encode", "rendered", "encoded")
    wrap(images, "_inline", "base64", "base64 read")
    wrap(ContentKey, "of", None, "hashed")
    wrap(images, "decode", "decode", "decoded")
    wrap(grid, "resized", "resize", "resized")
    wrap(ImageStore, "take", "take", "image has ids")
    wrap(SeenImages, "see", "see", "seen")
    wrap(Tower, "look", _TOWER, "tower launched")
    wrap(FixedPlaces, "place", "place rows", "rows placed")


def serve(port: int, folder: str, options: argparse.Namespace) -> None:
    """Until it is asked to stop; then prints the ways of images, and those of texts."""
    directory = save(Path(folder) / "model")
    wrap_way_in()
    if options.profile:
        threading.Thread(target=profile_when_asked, args=(Path(folder), options), daemon=True).start()
    run_stamped([str(directory), "--port", str(port), "--max-model-len", "4096"])
    ways = list(_ways())
    for what, seen in (("an image", True), ("a text", False)):
        chosen = [way for way in ways if (_TOWER in way) is seen][_FIRST:][: options.rounds]
        print(f"\n{what}: ms since the first byte, since the station before, and the 90th percentile of the first")
        print("\n".join(_report(chosen)), flush=True)
    print(
        "\nsteps by images that were looked at and tokens, rounded up to hundreds: their number, and the median of ms"
    )
    for (images, hundreds), times in sorted(_STEPS.items()):
        print(f"{images:4}{100 * hundreds:7}{len(times):6}{np.median(times):9.2f}")


def _ways() -> Iterator[Way]:
    """One for each request: the first byte behind an answer begins the next."""
    way: Way = {}
    for name, at in sorted(STAMPS, key=lambda stamped: stamped[1]):
        if name == _BYTES_IN and _COMPUTED in way and way[_COMPUTED] < at and "bytes out" in way:
            yield way
            way = {}
        if name == _BYTES_IN and name in way:
            way["last bytes in"] = at
        elif name == "bytes out" and "deliver" in way:
            way.setdefault("first token out", at)  # before it the head of the answer may go out
        way.setdefault(name, at)
    if _COMPUTED in way:
        yield way


def _report(ways: Sequence[Way]) -> list[str]:
    if not ways:
        return ["none"]
    names = [name for name in ways[0] if all(name in way for way in ways)]
    since = {name: np.asarray([way[name] - way[_BYTES_IN] for way in ways]) / 1e6 for name in names}
    lines, before = [], 0.0
    for name, times in sorted(since.items(), key=lambda item: float(np.median(item[1]))):
        middle = float(np.median(times))
        lines.append(f"{name:18}{middle:9.2f}{middle - before:9.2f}{np.percentile(times, 90):9.2f}")
        before = middle
    return lines


# --- the device ----------------------------------------------------------------------------------------------------


def profile_when_asked(folder: Path, options: argparse.Namespace) -> None:
    """Those of images, of texts, then of a crowd: the client tells by files where each begins and ends."""
    import torch

    for part, count in (("image", _PROFILED), ("text", _PROFILED), ("crowd", options.crowd)):
        _await(folder / f"{part}.begin")
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        profiler.start()
        (folder / f"{part}.begun").touch()
        _await(folder / f"{part}.end")
        profiler.stop()
        trace = folder / f"{part}.json"
        profiler.export_chrome_trace(str(trace))
        print(f"\n{part}, kernels of {count} requests")
        print("\n".join(_kernels(json.loads(trace.read_text())["traceEvents"], count)), flush=True)
        with trace.open("rb") as plain, gzip.open(f"{options.profile}.{part}.json.gz", "wb") as packed:
            shutil.copyfileobj(plain, packed)
        (folder / f"{part}.ended").touch()


def _await(file: Path) -> None:
    while not file.exists():
        time.sleep(0.02)


def _kernels(events: Sequence[dict[str, Any]], requests: int) -> list[str]:
    """Milliseconds of a request by name of kernel, and when nothing ran between the first and the last."""
    on_device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in on_device:
        by_name[event["name"]].append(event["dur"] / 1e3)
    lines = [f"{'name':90}{'ms':>9}{'count':>8}{'µs each':>9}"]
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:40]:
        each = 1e3 * sum(times) / len(times)
        lines.append(f"{name[:88]:90}{sum(times) / requests:9.3f}{len(times) / requests:8.1f}{each:9.1f}")
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in on_device)
    busy, end = 0.0, spans[0][0]
    for begin, until in spans:
        busy, end = busy + max(0.0, until - max(begin, end)), max(end, until)
    busy, whole = busy / 1e3 / requests, (end - spans[0][0]) / 1e3 / requests
    return [*lines, f"busy for {busy:.2f} of {whole:.2f} ms of each request, with the tokens behind the first"]


# --- the client ----------------------------------------------------------------------------------------------------


async def ask(url: str, folder: Path, options: argparse.Namespace) -> None:
    async with aiohttp.ClientSession() as session:
        asker = Asker(session, url, 2)
        count = _FIRST + options.rounds
        files = [picture(options.side, seed) for seed in range(count + _PROFILED)]
        texts = [f"{number} {'a' * 1427}" for number in range(count + _PROFILED)]
        took = [(await asker.first_and_all(file))[0] for file in files[:count]]
        long = [(await asker.first_and_all(None, question=text))[0] for text in texts[:count]]
        for what, times in (("an image", took), ("a text", long)):
            print(f"first token of {what}: {1e3 * float(np.median(times[_FIRST:])):.2f} ms at the client")
        for part in ("image", "text") if options.profile else ():
            (folder / f"{part}.begin").touch()
            await asyncio.to_thread(_await, folder / f"{part}.begun")
            for number in range(count, count + _PROFILED):
                if part == "image":
                    await asker.first_and_all(files[number])
                else:
                    await asker.first_and_all(None, question=texts[number])
            (folder / f"{part}.end").touch()
            await asyncio.to_thread(_await, folder / f"{part}.ended")
        if options.crowd:
            await ask_crowd(asker, folder, options, len(files))


async def ask_crowd(asker: Asker, folder: Path, options: argparse.Namespace, first: int) -> None:
    """Twice: once for the rate, and once for the profile."""
    limit = asyncio.Semaphore(options.at_once)

    async def bounded(file: bytes) -> None:
        async with limit:
            await asker.first_and_all(file, _ANSWER)

    for number in range(2 if options.profile else 1):
        begin = first + number * options.crowd
        with ThreadPoolExecutor() as threads:
            files = list(threads.map(lambda seed: picture(options.side, seed), range(begin, begin + options.crowd)))
        if number:
            (folder / "crowd.begin").touch()
            await asyncio.to_thread(_await, folder / "crowd.begun")
        began = time.perf_counter()
        await asyncio.gather(*map(bounded, files))
        rate = options.crowd / (time.perf_counter() - began)
        print(f"{rate:.2f} images per second, {options.at_once} at a time{', under the profiler' * number}", flush=True)
    if options.profile:
        (folder / "crowd.end").touch()
        await asyncio.to_thread(_await, folder / "crowd.ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--profile", type=Path, help="write traces to FILE.image.json.gz and FILE.text.json.gz")
    parser.add_argument("--crowd", type=int, default=0, help="images that are asked for together")
    parser.add_argument("--at-once", type=int, default=32, help="requests of the crowd at a time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, served(serve, folder, options) as port:
        asyncio.run(ask(f"http://127.0.0.1:{port}", Path(folder), options))


if __name__ == "__main__":
    main()
