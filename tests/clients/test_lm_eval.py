"""lm-eval by the page's command: log-likelihoods and greedy text are those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.clients.conftest import Program, command
from tests.cluster import MODELS

pytestmark = pytest.mark.slow

# No context ends with white space, which lm-eval would count to the answer.
QUESTIONS: list[dict[str, Any]] = [
    {"context": "def area(radius):\n    return", "choices": [" radius", " None", " self.name"], "gold": 0},
    {"context": "import os\nimport", "choices": [" sys", " radius * 2", " re\n\n\ndef main():\n    pass"], "gold": 0},
    {"context": "for i in range(10):", "choices": ["\n    print(i)\n", "\n    i += 1\n    continue\n", "x"], "gold": 0},
    {
        "context": "class Point:\n    def __init__(self):",
        "choices": ["\n        self.x = x\n", " return"],
        "gold": 0,
    },
]
CHOICE = """
task: outrider_choice
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
GENERATION = """
task: outrider_generation
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{gold}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 24, temperature: 0.0, do_sample: false}
metric_list: [{metric: exact_match}]
"""
DATA = """
dataset_path: json
dataset_kwargs: {data_files: FILE}
test_split: train
"""


def samples(program: Program, front: str, folder: Path, name: str, task: str) -> list[dict[str, Any]]:
    """Run a task over the questions; return what lm-eval logged of each."""
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS), encoding="utf-8")
    (folder / f"{name}.yaml").write_text(task + DATA.replace("FILE", str(data)), encoding="utf-8")
    more = ("--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples")
    program(*command("lm_eval", front, hellaswag=name), *more)
    (found,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
    lines = [json.loads(line) for line in found.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == len(QUESTIONS)
    return lines


def test_log_likelihoods_are_those_of_transformers(program: Program, front: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    checked = 0
    for line in samples(program, front, tmp_path, "outrider_choice", CHOICE):
        context = line["doc"]["context"]
        for choice, ((found, is_greedy),) in zip(line["doc"]["choices"], line["resps"], strict=True):
            whole, start = tokenizer(context + choice).input_ids, len(tokenizer(context).input_ids)
            with torch.inference_mode():
                logits = model(torch.tensor([whole])).logits[0, start - 1 : -1].double()
            wanted = logits.log_softmax(-1).gather(1, torch.tensor(whole[start:])[:, None]).sum().item()
            assert float(found) == pytest.approx(wanted, abs=1e-4)
            assert (str(is_greedy) == "True") == (logits.argmax(-1).tolist() == whole[start:])
            checked += 1
    assert checked == sum(len(each["choices"]) for each in QUESTIONS)


def test_greedy_text_is_that_of_transformers(program: Program, front: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    for line in samples(program, front, tmp_path, "outrider_generation", GENERATION):
        prompt = tokenizer(line["doc"]["context"], return_tensors="pt")
        written = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt.input_ids.shape[1] :]
        wanted = tokenizer.decode(written, skip_special_tokens=True).split("\n\n")[0]
        assert line["resps"][0][0] == wanted
