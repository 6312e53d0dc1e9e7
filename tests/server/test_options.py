"""The command line and the TOML file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bequest.engine.config import EngineConfig, ServerConfig
from bequest.server.__main__ import main
from bequest.server.process.options import options_of, parse


def test_defaults() -> None:
    assert parse(["serve"]) == (EngineConfig(), ServerConfig())


def test_flags() -> None:
    line = (
        "serve some/model --port 0 --api-key a --api-key b --no-pipelined --guard-metrics "
        "--dtype float32 --max-model-len 64 --max-body-mb 1.5"
    )
    engine, server = parse(line.split())
    assert engine == EngineConfig(model="some/model", pipelined=False, dtype="float32", max_model_len=64)
    assert server == ServerConfig(port=0, api_key=["a", "b"], guard_metrics=True, max_body_mb=1.5)


def test_several_names(capsys: pytest.CaptureFixture[str]) -> None:
    """At once or one by one. A model behind several is not taken for one of them."""
    for line in ("m --served-model-name a b", "--served-model-name a --served-model-name b --port 1 m"):
        engine, server = parse(["serve", *line.split()])
        assert engine.model == "m" and server.served_model_name == ["a", "b"]
    for names in (["a"], ["a", "b"]):
        line = [word for name in names for word in ("--served-model-name", name)]
        assert parse(["serve", *line])[1].served_model_name == names, "of the embedded model"
    with pytest.raises(SystemExit):
        parse(["serve", "--served-model-name", "a", "m"])
    assert "is 'm' the model?" in capsys.readouterr().err


def test_every_field_has_a_flag_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["serve", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for option in (*options_of(EngineConfig), *options_of(ServerConfig)):
        assert option.name == "model" or option.flag in shown
    for usage in ("--lora NAME=PATH", "--record FILE", "--allowed-origins ORIGIN", "--speculative NAME[:K]"):
        assert f"{usage}\n" in shown or f"{usage} " in shown
    names = [f.name for config in (EngineConfig, ServerConfig) for f in dataclasses.fields(config)]
    assert len(names) == len(set(names)), "one name, one meaning"


def test_file_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "bequest.toml"
    file.write_text(
        'model = "m"\nport = 1\nmax-model-len = 32\nserved_model_name = "one"\nmax_body_mb = 4\npipelined = false\n'
    )
    engine, server = parse(["serve", "--config", str(file), "--port", "2"])
    assert engine == EngineConfig(model="m", max_model_len=32, pipelined=False)
    assert server == ServerConfig(port=2, served_model_name=["one"], max_body_mb=4.0)


def test_paths_begin_at_home_where_they_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "bequest.toml").write_text('estate-dir = "~/estates"\nfiles_dir = "files"')
    engine, server = parse(["serve", "--config=~/bequest.toml", "--record=~/all"])
    assert (engine.estate_dir, engine.record) == (f"{tmp_path}/estates", f"{tmp_path}/all")
    assert (server.files_dir, server.api_key_file) == ("files", None)


@pytest.mark.parametrize(
    "toml, message",
    [
        ("prot = 1", "unknown key 'prot'; did you mean 'port'?"),
        ("zzzzzz = 1", "unknown key 'zzzzzz'\n"),
        ("swap_space = 4", "unknown key 'swap_space': the flag is --host-cache-gb"),
        ("[server]\nport = 1", "[server] is a table, and there are none: write the keys at the top of the file"),
        ('port = "1"', "port must be an integer, not '1'"),
        ("port = true", "port must be an integer, not True"),
        ('dtype = "int3"', "dtype must be one of"),
        ("api_key = [1]", "api_key must be a string"),
        ("block_size = 0", "block_size must be at least 1"),
        ("port = ", "Invalid value"),
    ],
)
def test_wrong_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], toml: str, message: str) -> None:
    file = tmp_path / "bequest.toml"
    file.write_text(toml)
    with pytest.raises(SystemExit) as ended:
        parse(["serve", "--config", str(file)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_wrong_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["serve", "--prot", "1"], "unknown argument --prot; did you mean --port?"),
        (["serve", "--max-mdel-len=8"], "unknown argument --max-mdel-len=8; did you mean --max-model-len?"),
        (["serve", "--model", "x"], "unknown argument --model: name the model without a flag: bequest serve MODEL"),
        (["serve", "-hf", "a/b"], "unknown argument -hf: name the model without a flag: bequest serve ORG/NAME:Q4_K_M"),
        (["serve", "m", "--ctx-size=9"], "unknown argument --ctx-size=9: the flag is --max-model-len"),
        (["serve", "one", "two"], "unknown argument two: there is one model"),
        (["serve", "--zzzz"], "unknown argument --zzzz\n"),
        (["serve", "--config", "/nowhere.toml"], "No such file"),
        (["sevre"], "sevre"),
        (["serve", "--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["serve", "--state-interval", "9" * 23], "state_interval must be at most 1000000000, not 1e+23"),
        (["serve", "--host-cache-gb", "1e300"], "host_cache_gb must be at most 1000000000, not 1e+300"),
        (["serve", "--threads", "100000"], "threads must be at most 4096, not 100000"),
        (["serve", "--kv-cache-gb", "0"], "kv_cache_gb must be over 0"),
        (["serve", "--kv-cache-gb", "nan"], "kv_cache_gb must be a finite number"),
        (["serve", "--gpu-memory-utilization", "90"], "gpu_memory_utilization must be over 0, at most 1"),
        (["serve", "--port", "65536"], "port must be from 0 to 65535"),
        (["serve", "--port", "-1"], "port must be from 0"),
        (["serve", "--max-body-mb", "inf"], "max_body_mb must be a finite number"),
        (["serve", "--client-timeout", "0"], "client_timeout must be over 0"),
        (["serve", "--stored-responses", "-1"], "stored_responses must not be negative"),
        (["serve", "--allow-image-hosts", "a.org,b.org"], "allow_image_hosts has 'a.org,b.org': each is a name"),
        (["serve", "--allow-image-hosts", "https://a.org"], "allow_image_hosts has 'https://a.org'"),
        (["serve", "--image-dir", "/nowhere"], "image_dir must be a directory that exists, not '/nowhere'"),
        (["serve", "--allowed-origins", "app.example"], "allowed_origins has 'app.example': each is * or an origin"),
        (["serve", "--allowed-origins", "https://app.example/"], "without a path, such as https://app.example"),
        (["serve", "--served-model-name", ""], "served_model_name must not be empty"),
        (["serve", "--sse-keep-alive-interval", "-1"], "sse_keep_alive_interval must not be negative"),
    ):
        with pytest.raises(SystemExit) as ended:
            parse(arguments)
        said = capsys.readouterr().err
        assert ended.value.code == 2 and message in said and said.count("\n") <= 2, "the message is not buried"
    origins = ["*", "null", "https://app.example", "http://localhost:3000", "http://[::1]:80", "chrome-extension://ab"]
    origins.append("file://")  # as the web view of an app says
    assert parse(["serve", *(f"--allowed-origins={origin}" for origin in origins)])[1].allowed_origins == origins
    with pytest.raises(SystemExit):
        parse([])
    assert "bequest serve --help" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line, message",
    [
        ("run m hi --temp 0", "bequest run: unknown argument --temp; did you mean --temperature?"),
        ("run m --prompt hi", "--prompt: give the prompt without a flag"),
        ("run m say hello", "unknown argument hello: a prompt of several words stands in quotes"),
        ("chat --sys x", "bequest chat: unknown argument --sys; did you mean --system?"),
        ("chat one two", "unknown argument two: the first message is typed"),
        ("pull", "bequest pull: the following arguments are required: MODEL"),
        ("pull one two", "unknown argument two: there is one model at a time"),
        ("list --path", "bequest list: unknown argument --path; did you mean --paths?"),
        ("rm --yess x", "bequest rm: unknown argument --yess; did you mean --yes?"),
        (
            "bench srve",
            "bequest bench: argument serve | two-stage: 'srve' is not one of serve, two-stage; did you",
        ),
        ("bench serve --num-prompts 8", "bequest bench serve: unknown argument --num-prompts: the flag is --requests"),
        ("bench serve --conc 8", "bequest bench serve: unknown argument --conc; did you mean --concurrency?"),
        ("bench two-stage --job 8", "bequest bench two-stage: unknown argument --job; did you mean --jobs?"),
        ("install-service --soc", "unknown argument --soc"),
        ("serev", "bequest: argument COMMAND: 'serev' is not one of serve, chat, run, "),
    ],
)
def test_every_command_says_in_one_line_what_is_wrong(
    capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2 and message in said
    assert said.count("\n") == 2 and "usage" not in said
