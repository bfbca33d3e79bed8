"""One run from a dense model without indexers to an assistant: each stage starts from the one before."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest

from experiments import dsa_sparse, dsa_warmup, pretrain
from glm5_jax.checkpoint import store
from glm5_jax.data.chat_data import ChatSourceConfig
from glm5_jax.data.chat_tasks import ChatTaskConfig
from glm5_jax.data.mixture import DataConfig
from glm5_jax.data.sources import SourceConfig
from glm5_jax.model import glm5
from glm5_jax.parallel import tree
from glm5_jax.runtime.preemption import PreemptionGuard
from glm5_jax.text import layouts
from glm5_jax.training import report
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.pretraining import ExperimentConfig, SampleConfig
from glm5_jax.training.schedule import ScheduleConfig
from glm5_jax.training.step_config import StepConfig
from launch import stage_runner
from tests.model.small import one_layer

STEPS = 2
STAGES = ("dense", "warm_up", "sparse", "sft")
CHATS = ChatSourceConfig(
    chats=ChatTaskConfig(kind="chain", size=200, steps=2),
    category="reasoning",
    mode="preserved",
    variant="glm5.2",
)


def lifecycle():
    base = ExperimentConfig(
        name="dense",
        model=one_layer(num_nextn_predict_layers=0),
        data=DataConfig(
            sources=(SourceConfig(kind="shakespeare"),),
            sequence_length=64,
            shuffle_window=64,
            num_threads=0,
        ),
        batch=pretrain.constant_batch(512),
        optimizer=OptimizerConfig(matrices="adamw"),
        schedule=ScheduleConfig(kind="constant", peak=1e-3, warmup_steps=0, total_steps=STEPS),
        step=StepConfig(remat="none"),
        train=TrainConfig(eval_interval=0, sample_interval=0),
    )
    indexed = dataclasses.replace(base, model=dataclasses.replace(base.model, index_topk=16))
    warm = dsa_warmup.freeze_trunk(
        indexed, "warm-up", schedule=dsa_warmup.make_warmup_schedule(STEPS)
    )
    sparse = dsa_sparse.sparsify_stage(indexed, "sparse", 1e-3, STEPS)
    tuned = dataclasses.replace(
        sparse,
        name="sft",
        data=DataConfig(sources=(CHATS,), sequence_length=64, packing="best_fit", num_threads=0),
        train=TrainConfig(eval_interval=0, sample_interval=STEPS),
        sample=SampleConfig(prompts=("a=3+4 a?",), tokens=2, temperature=0.0, chat=True),
    )
    stages = (base, warm, sparse, tuned)
    return dataclasses.make_dataclass("Life", STAGES)(*stages)


def weights(config, folder):
    params = store.load_params(folder, glm5.abstract_params(config.model))
    return jax.device_get(tree.flatten(params))


@pytest.mark.slow
def test_dense_model_becomes_sparse_chat_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "write_page", lambda workdir: None)  # of each stage: seconds
    config = lifecycle()
    assert (
        stage_runner.run_stages(types.SimpleNamespace(), config, tmp_path, PreemptionGuard()) == 0
    )
    dense, warm, sparse, tuned = (
        weights(getattr(config, name), tmp_path / name) for name in STAGES
    )
    assert {path for path in warm if path not in dense} == {p for p in warm if "indexer/" in p}
    for path, before in dense.items():
        np.testing.assert_array_equal(warm[path], before, err_msg=path)
    # With one layer and no experts, every weight is trained.
    assert all((sparse[path] != before).any() for path, before in warm.items())
    assert all((tuned[path] != before).any() for path, before in sparse.items())
    # The last stage trains on the layout of its tokenizer, and its samples have this layout too.
    template = (tmp_path / "sft" / "tokenizer" / "chat_template.jinja").read_text()
    assert template == layouts.template("glm5.2") != layouts.template("glm5")
    assert (tmp_path / "sparse" / "tokenizer" / "chat_template.jinja").read_text() != template
    samples = (tmp_path / "sft" / "samples" / f"{STEPS}.txt").read_text()
    question = "<|user|>a=3+4 a?<|assistant|><think>"
    assert samples.startswith(f"[gMASK]<sop><|system|>Reasoning Effort: Max{question}")
    assert f"\n\n[gMASK]<sop>{question}</think>" in samples
    page = (tmp_path / "report" / "index.html").read_text()
    assert page.index(">dense<") < page.index(">warm_up<") < page.index(">sparse<")
    assert "random weights" in page and capsys.readouterr().out.count("all stages") == len(STAGES)
    started = [json.loads((tmp_path / name / "config.json").read_text()) for name in STAGES]
    before = [None, *(str(tmp_path / name) for name in STAGES[:-1])]
    assert [stage["checkpoint"] for stage in started] == before
    assert [stage["model"]["attention"] for stage in started] == [
        "dense",
        "dense",
        "sparse",
        "sparse",
    ]
