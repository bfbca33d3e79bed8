"""The command that quantises a checkpoint, and the served result."""

import sys

import jax
import numpy as np
import pytest

from experiments import quantise
from glm5_jax.checkpoint import models
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.inference.quantize.recipe import QuantizationRecipe, WeightConverter
from glm5_jax.inference.quantize.streaming import num_bytes_of
from glm5_jax.inference.shards.offer import named_arrays
from glm5_jax.model import glm5
from glm5_jax.parallel.fingerprint import read_fingerprint
from glm5_jax.parallel.tree import flatten
from glm5_jax.rl.weights.offers import make_offer
from glm5_jax.text.tokenizer import Tokenizer
from pallas_kernels.quantized_weights import Int4, Int8
from tests.inference.test_engine import model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("plain")
    save_hf(model(), out, tokenizer=Tokenizer.default())
    return out


@pytest.fixture(params=[["--plain"], pytest.param([], marks=pytest.mark.slow)], ids=str)
def quantised_folder(folder, tmp_path, capsys, request):
    """Returns the folder that the program writes."""
    out = tmp_path / "out"
    assert quantise.main([str(folder), str(out), "--group=32", *request.param]) == 0
    assert "bytes of weights" in capsys.readouterr().out
    return out


def test_quantised_model_is_smaller_and_nearly_equal(quantised_folder, tmp_path, capsys):
    out, loaded = quantised_folder, models.load_model(quantised_folder)
    kinds = {type(leaf) for leaf in flatten(glm5.params_of(loaded)).values()}
    assert {Int4, Int8} <= kinds
    assert num_bytes_of(glm5.params_of(loaded)) < 0.6 * num_bytes_of(glm5.params_of(model()))
    tokens = np.random.default_rng(0).integers(0, 2000, (2, 32))
    got, want = (jax.nn.log_softmax(one(tokens)) for one in (loaded, model()))
    assert 0 < np.abs(got - want).mean() < 0.05
    assert_push_equals(loaded, QuantizationRecipe.read(out))
    assert quantise.main([str(out), str(tmp_path / "again")]) == 2
    assert "is quantised already" in capsys.readouterr().err


def assert_push_equals(quantised, recipe):
    """Checks that a trainer with the same weights offers, bit for bit, those of a quantised model."""
    trained = model()
    converter = WeightConverter(trained.cfg, recipe)
    offer, _ = make_offer(glm5.params_of(trained), trained.cfg, 1, converter=converter)
    leaves = flatten(glm5.params_of(quantised)).items()
    arrays = {name: x for path, leaf in leaves for name, x in named_arrays(path, leaf).items()}
    assert offer.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        offered = offer.arrays[name]
        assert offered.fingerprint == read_fingerprint(array.astype(offered.dtype)), name


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["/nowhere", "OUT"], "checkpoint /nowhere does not exist"),
        (["PLAIN", "PLAIN"], "is not empty; give a new folder"),
        (
            ["PLAIN", "OUT", "--group=7"],
            "--group=7: int4_group is 7; use an even divisor of hidden",
        ),
        (
            ["PLAIN", "OUT", "--group=0"],
            "--group=0: int4_group is 0; use an even divisor of hidden",
        ),
        (["PLAIN", "OUT", "--group=x"], "argument --group: invalid int value: 'x'; see python -m"),
        (["PLAIN"], "arguments are required: OUT; see python -m experiments.quantise --help"),
        (["PLAIN", "OUT", "--grup=4"], "unrecognized arguments: --grup=4"),
        (["PLAIN", __file__], "is a file; give a new folder"),
        (["PLAIN", "OUT", "--group=32", "--text=/dev/null"], "/dev/null has 0 tokens"),
        (["PLAIN", "OUT", "--text=/nowhere"], "no file /nowhere for --text; give a text file"),
        (["PLAIN", "OUT", "--group=32", f"--text={sys.executable}"], "is not UTF-8 text"),
    ],
)
def test_reports_wrong_arguments_in_one_line(folder, tmp_path, capsys, arguments, words):
    names = {"PLAIN": str(folder), "OUT": str(tmp_path / "out")}
    assert quantise.main([names.get(argument, argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
