"""Makes the golden peft_tiny_d: an adapter of hf_tiny_d as PEFT saves it, and what the adapted model computes.

    python -m venv /tmp/peft
    /tmp/peft/bin/pip install torch==2.13.0 transformers==5.23.0 peft==0.21.2 numpy==2.4.6 safetensors==0.8.0
    /tmp/peft/bin/python tests/goldens/make_peft.py

`make_peft.py FOLDER` loads the adapter of a folder, which another program saved, into hf_tiny_d instead. It exits with
an error unless the model then computes the golden's logits.

The adapter has rank 3 and alpha 7.5, and both of its matrices are random. Its targets are all matrices of attention,
dense MLP, shared and routed experts. Dense and shared matrices are targets by parameter: PEFT 0.21 takes a target
module named gate_proj, up_proj or down_proj of these models for the routed experts of older files.
"""

import json
import pathlib
import sys

import numpy as np
import peft
import torch
import transformers
from make_goldens import eager, wide
from safetensors.torch import load_file

FOLDER = pathlib.Path(__file__).parent
BASE, GOLDEN = FOLDER / "hf_tiny_d", FOLDER / "peft_tiny_d"
MODULES = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
PARAMETERS = [
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")),
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
]


def base():
    """Returns the model of hf_tiny_d in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    return eager(model)


def float64_twin(model):
    """Returns the same model in float64, including the frequencies of its RoPE."""
    with wide():
        twin = eager(type(model)(model.config)).double()
    twin.load_state_dict({name: x.double() for name, x in model.state_dict().items()})
    return twin


def draw(model):
    """Fills both matrices of every adapter with random numbers, so large that the logits change visibly."""
    numbers = torch.Generator().manual_seed(505)
    for name, weight in sorted(model.named_parameters()):
        if "lora_" in name:
            noise = torch.randn(weight.shape, generator=numbers)
            weight.data.copy_(noise * (0.3 if "lora_B" in name else weight.shape[-1] ** -0.5))


def tidy():
    """Removes parts that depend on the machine or on the order of a set."""
    (GOLDEN / "README.md").unlink(missing_ok=True)
    (GOLDEN / "adapter_model.safetensors").chmod(0o644)
    file = GOLDEN / "adapter_config.json"
    config = json.loads(file.read_text()) | {"base_model_name_or_path": BASE.name}
    config |= {name: sorted(config[name]) for name in ("target_modules", "target_parameters")}
    file.write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def compute(model, ids):
    """Returns (logits, loss) of a prompt."""
    out = model(input_ids=ids, labels=ids, use_cache=False)
    return out.logits, out.loss


def under_saved_names(model):
    """Returns {name in adapter_model.safetensors: gradient} of every adapter."""
    return {
        name.replace(".default", ""): weight.grad.double().numpy()
        for name, weight in model.named_parameters()
        if "lora_" in name
    }


def main():
    ids = torch.tensor(np.load(BASE / "arrays.npz")["input_ids"])
    if sys.argv[1:]:
        [folder] = sys.argv[1:]
        model = peft.PeftModel.from_pretrained(base(), folder)
        logits, _ = compute(model, ids)
        difference = np.abs(
            logits.detach().numpy() - np.load(GOLDEN / "expected.npz")["logits"]
        ).max()
        print(f"largest difference of the logits: {difference:.2e}")
        sys.exit(int(difference > 1e-4))
    config = peft.LoraConfig(
        r=3,
        lora_alpha=7.5,
        target_modules=MODULES,
        target_parameters=PARAMETERS,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base(), config)
    draw(model)
    logits, _ = compute(model, ids)
    model.save_pretrained(GOLDEN)
    tidy()
    saved = load_file(GOLDEN / "adapter_model.safetensors")
    assert len(saved) == sum("lora_" in name for name, _ in model.named_parameters())
    # The float64 twin, and its gradients.
    twin = peft.PeftModel.from_pretrained(float64_twin(base()), GOLDEN, is_trainable=True).double()
    with wide():
        exact, loss = compute(twin, ids)
        loss.backward()
        gradients = under_saved_names(twin)
    assert set(gradients) == set(saved)
    plain, _ = compute(base(), ids)
    difference = (logits - exact).abs().max().item()
    assert difference < 1e-4, difference
    print(
        f"float32 to float64: {difference:.1e}; change by the adapter: {(plain - logits).abs().max():.2f}"
    )
    np.savez_compressed(
        GOLDEN / "expected.npz",
        logits=logits.detach().numpy(),
        logits_f64=exact.detach().numpy(),
        loss_f64=loss.detach().numpy(),
        **{f"grad/{name}": gradient.astype(np.float32) for name, gradient in gradients.items()},
    )


main()
