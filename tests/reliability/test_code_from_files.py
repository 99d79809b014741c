"""Files of strangers that try to run code, to unpickle or to connect; commands open them in a process with a hook."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_engine.training.rl import RlTrainer
from tests.training.test_data import train_config, write_model, write_prompts, write_rows

WATCHED = (
    "pickle.find_class",
    "socket.connect",
    "socket.getaddrinfo",
    "socket.bind",
    "os.system",
    "os.exec",
    "os.posix_spawn",
)
TALK = [{"prompt": [{"role": "user", "content": "red cat"}]}]
MARKUP = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


class Bomb:
    """What unpickling runs."""

    def __init__(self, ran: Path) -> None:
        self.ran = str(ran)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.ran,)


def changed(path: Path, **changes: Any) -> None:
    """A JSON file with other values."""
    held = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**held, **changes}))


Plant = Callable[[Path, Path], Any]
MINE = "import os\nos.mkdir({ran!r})\nclass Mine: pass\n"


def code(file: str, **changes: Any) -> Plant:
    """A Python file beside a config that names it."""

    def plant(at: Path, ran: Path) -> None:
        (at / "mine.py").write_text(MINE.format(ran=str(ran)))
        changed(at / file, **changes)

    return plant


def bombs(*names: str, instead: bool = False) -> Plant:
    """Pickles by these names; of torch's form where a name ends so."""

    def plant(at: Path, ran: Path) -> None:
        for name in names:
            (at / name).parent.mkdir(exist_ok=True)
            if name.endswith((".bin", ".pt", ".pth")):
                torch.save({"a": Bomb(ran)}, at / name)
            else:
                (at / name).write_bytes(pickle.dumps(Bomb(ran)))
        if instead:
            (at / "model.safetensors").unlink()

    return plant


def template(text: str) -> Plant:
    return lambda at, ran: changed(at / "tokenizer_config.json", chat_template=text.replace("RAN", str(ran)))


AUTO = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine", "AutoModel": "mine.Mine"}
ESCAPES = (
    "{{ cycler.__init__.__globals__.os.mkdir('RAN') }}", "{{ lipsum.__globals__['os'].mkdir('RAN') }}",
    "{{ joiner.__init__.__globals__.os.system('mkdir RAN') }}", "{{ raise_exception.__globals__['os'].mkdir('RAN') }}",
    "{{ strftime_now.__globals__['__builtins__']['open']('RAN', 'w') }}", "{% include '/etc/passwd' %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.eval_ctx.environment.from_string('x') }}",
    "{% for m in messages %}{{ m.update(role=1) }}{% endfor %}",
    "{{ (messages|attr('__class__')).__base__.__subclasses__()|length }}", "{% import 'mine.py' as x %}",
)  # fmt: skip
MODELS: dict[str, Plant] = {  # what is planted into a model's folder
    "auto_map": code("config.json", auto_map=AUTO),
    "an architecture with code": code("config.json", auto_map=AUTO, model_type="mine"),
    "a tokenizer with code": code("tokenizer_config.json", auto_map={"AutoTokenizer": ["mine.Mine", "mine.Mine"]}),
    "a tokenizer class": code("tokenizer_config.json", tokenizer_class="mine.Mine"),
    "attention of the Hub": code("config.json", attn_implementation="nobody/mine", _attn_implementation="nobody/mine"),
    "a repository's auto_map": code("config.json", auto_map={"AutoConfig": "nobody/mine--mine.Mine"}),
    "a quantiser": code("config.json", quantization_config={"quant_method": "mine.Mine"}),
    "a dtype": code("config.json", dtype="os.system", torch_dtype="os.system"),
    "generation's code": code("generation_config.json", custom_generate="nobody/mine"),
    "a processor": code("preprocessor_config.json", auto_map={"AutoProcessor": "mine.Mine"}),
    "pickled weights alone": bombs("pytorch_model.bin", instead=True),
    "pickled weights beside": bombs("pytorch_model.bin", "training_args.bin", "optimizer.pt",
    "scheduler.pt", "rng_state.pth"),
    "a pickle named safetensors": bombs("model.safetensors"), "pickled heads": bombs("heads.safetensors"),
    "a pickled tokenizer": bombs("tokenizer.json", "tokenizer.model", "vocab.pkl"),
    "a pickled index": bombs("pytorch_model.bin", "model.safetensors.index.json", instead=True),
    "modules of known names": lambda at, ran: [(at / f"{n}.py").write_text(MINE.format(ran=str(ran))) for n in ("torch",
    "json", "sitecustomize", "conftest", "numpy")], **{text[:60]: template(text) for text in ESCAPES},
}  # fmt: skip
ADAPTERS: dict[str, Plant] = {  # into a folder of a trained actor
    "a pickled adapter alone": lambda at, ran: [bombs("adapter_model.bin")(at, ran),
    (at / "adapter_model.safetensors").unlink()], "a pickle named adapter_model": bombs("adapter_model.safetensors"),
    "auto_mapping": code("adapter_config.json", auto_mapping={"base_model_class": "Mine", "parent_library": "mine"}),
    "a base elsewhere": code("adapter_config.json", base_model_name_or_path="http://127.0.0.1:9/m"),
    "corda": code("adapter_config.json", init_lora_weights="mine.Mine", peft_type="mine.Mine"),
    "a pickled value": bombs("adapter_config.json"),
}  # fmt: skip
CHECKPOINTS = {name: bombs(name) for name in (
    "optimizer.safetensors", "optimizer.pt", "rng_state.pth", "state.json", "manifest.json", "policies.safetensors",
)}  # fmt: skip
DATA: dict[str, Plant] = {  # into an empty folder that is a data source
    "a script": lambda at, ran: (at / f"{at.name}.py").write_text(MINE.format(ran=str(ran))),
    "an arrow pickle": bombs("data.arrow", "dataset_info.json", "state.json"),
    "pickled rows": bombs("train.parquet"), "pickled lines": bombs("train.jsonl"),
    "a type of rows": code("state.json", _data_files=[{"filename": "mine.py"}]),
    "a builder": code("dataset_info.json", builder_name="mine", features={"a": {"_type": "mine.Mine"}}),
}  # fmt: skip
TAGS = ("object/apply:os.mkdir ['RAN']", "object/new:os.mkdir ['RAN']", "name:os.mkdir", "module:mine", "object:m.M {}")


def attacks(root: Path) -> list[tuple[str, str]]:
    """Labels and command lines; what they open is planted under `root`, whose folder `ran` shows what ran."""
    model = write_model(root / "model", reward_head=True)
    RlTrainer(train_config(model, root / "run", max_steps=1, save_steps=1)).run()
    talks, base = write_rows(root / "talks.jsonl", TALK), f"--model_name_or_path={model}"
    few = "--max_completion_length=4 --device=cpu"
    train = f"train --dataset_name={write_prompts(root)} --max_steps=1 {few} --output_dir={{at}}.out"
    kinds = {  # what is planted, into what, and the command lines that open it
        "model": (
            MODELS, model, "generate --model_name_or_path={at} --prompt=red " + few,
            f"{train} {base} --reward_model_path={{at}}",
        ), "adapter": (
            ADAPTERS, root / "run" / "final", f"generate {base} --adapter={{at}} --prompt=red {few}",
            f"export {{at}} --to=merged {base} --output_dir={{at}}.out",
        ),
        "checkpoint": (CHECKPOINTS, root / "run" / "checkpoint-1", f"{train} {base} --resume_from_checkpoint={{at}}"),
        "data": (DATA, None, f"sft --full {base} --dataset_name={{at}} --output_dir={{at}}.out --device=cpu"),
    }  # fmt: skip
    found: list[tuple[str, str]] = []
    for kind, (plants, origin, *lines) in kinds.items():
        for i, (name, plant) in enumerate(plants.items()):
            at = root / f"{kind}{i}"
            shutil.copytree(origin, at) if origin is not None else at.mkdir()
            (at / "manifest.json").unlink(missing_ok=True)
            plant(at, root / "ran" / f"{kind} {i}")
            own = [line.replace("--prompt=red", f"--dataset_name={talks}") if "{" in name else line for line in lines]
            found += [(f"{kind}: {name}: {line[:8]}", line.format(at=at)) for line in own]
    for i, tag in enumerate(TAGS):
        (root / f"{i}.yaml").write_text(f"seed: !!python/{tag}".replace("RAN", str(root / "ran" / f"yaml {i}")))
        found.append((f"yaml: {tag}", f"{train} {base} --config={root}/{i}.yaml".format(at=root / "y")))
        found.append((f"grid: {tag}", f"sweep {root}/{i}.yaml --output_dir={root}/y"))
    found.append(("a name of the Hub", f"generate --model_name_or_path=nobody/mine --prompt=red {few}"))
    found.append(("data of the Hub", f"sft --full {base} --dataset_name=nobody/mine --output_dir={root}/h"))
    page = shutil.copytree(root / "run", root / "page")
    marked = {"step": 1, "prompts": [MARKUP], "completions": [MARKUP], "scores": [1.0]}
    (page / "samples.jsonl").write_text(json.dumps(marked) + "\n")
    changed(page / "run.json", command=MARKUP)
    (root / "secret").write_text("mine alone")
    (page / "curves.png").unlink(missing_ok=True)
    (page / "curves.png").symlink_to(root / "secret")
    found.append(("a page", f"report {page} --out={root}/page.html"))
    return found


def watch(root: Path, every: int) -> None:
    """Run every attack in this process, and print what it did as a line of JSON."""
    from rlhf_engine.commands.main import main

    cases = attacks(root)
    (root / "ran").mkdir()
    seen: list[str] = []
    armed = [False]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not armed[0]:
            return
        place = (
            getattr(arguments[0], "co_filename", "")
            if event == "exec"
            else str(arguments[1])
            if event == "import"
            else ""
        )
        if (
            event in WATCHED
            or place.startswith(str(root))
            or (event == "subprocess.Popen" and "git" not in str(arguments[0]))
        ):
            seen.append(f"{event} {str(arguments)[:150]}")

    sys.addaudithook(hook)
    load = torch.load
    torch.load = lambda *args, **options: (seen.append(f"torch.load {args[0]}"), load(*args, **options))[1]
    os.chdir(root / "model16")  # the modules of known names
    sys.stdin = io.StringIO("y\n" * 99)
    for label, line in [*cases[::every], cases[-1]]:
        seen.clear()
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            armed[0] = True
            try:
                code: Any = main(line.split())
            except Exception as error:  # it is in the record
                code = repr(error)
            armed[0] = False
        ran = sorted(path.name for path in (root / "ran").iterdir())
        print("RECORD " + json.dumps([label, code, seen + ran, out.getvalue()[-300:]]), flush=True)


@pytest.mark.parametrize(("every", "least"), [(9, 11), pytest.param(1, 90, marks=pytest.mark.long)])
def test_no_file_makes_the_process_run_code_unpickle_or_connect(tmp_path, survived, every, least):
    program = [sys.executable, "-m", "tests.reliability.test_code_from_files", str(tmp_path), str(every)]
    done = subprocess.run(
        program, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    records = [
        json.loads(line.removeprefix("RECORD ")) for line in done.stdout.splitlines() if line.startswith("RECORD ")
    ]
    failures = [f"{label}: {seen} {said}" for label, code, seen, said in records if seen or code not in (0, 1, 2)]
    html = (tmp_path / "page.html").read_text() if (tmp_path / "page.html").exists() else MARKUP
    if "<img src=x" in html or "Content-Security-Policy" not in html:
        failures.append("a page: markup of an answer")
    if (tmp_path / "secret").read_text() != "mine alone":
        failures.append("a page: written through a link")
    print("\n".join(failures), done.stderr[-2000:])
    assert done.returncode == 0
    assert len(records) >= least
    survived("code_from_files", len(records), len(failures))


if __name__ == "__main__":
    watch(Path(sys.argv[1]), int(sys.argv[2]))
