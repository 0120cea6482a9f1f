"""IVON in the Hugging Face Trainer: a small language model learns to count, with a posterior over its weights.

python examples/trainer.py        # takes seconds on a CPU; needs `pip install threepo[trainer]`
"""

import tempfile
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainingArguments

import threepo
from threepo.plugins.transformers import IVONTrainer

torch.manual_seed(0)
shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
config = Qwen2Config(vocab_size=16, num_attention_heads=2, num_key_value_heads=1, **shape)
counting = (torch.randint(16, (64, 1)) + torch.arange(12)) % 16  # such as 7 8 9 10 ..., modulo 16
data = [{"input_ids": row, "labels": row} for row in counting]

folder = Path(tempfile.mkdtemp())
arguments = TrainingArguments(
    output_dir=str(folder / "run"),
    learning_rate=1.0,  # IVON's; schedulers change it as usual
    max_grad_norm=0.0,  # IVON refuses clipped gradients
    max_steps=60,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,  # both micro-batches use one draw of the weights
    logging_steps=20,
    report_to="none",
    disable_tqdm=True,
)
# These settings are for a very small model. For a real one, start from ess=1e9 and the other defaults.
ivon = {"ess": 1e5, "hess_init": 0.1, "clip_radius": 0.1}
trainer = IVONTrainer(Qwen2ForCausalLM(config), arguments, train_dataset=data, eval_dataset=data, ivon=ivon)

before = trainer.evaluate()["eval_loss"]
trainer.train()
after = trainer.evaluate()["eval_loss"]
trainer.save_model(str(folder / "model"))  # the mean, and posterior.safetensors next to it

model = Qwen2ForCausalLM.from_pretrained(folder / "model")
posterior = threepo.Posterior.from_pretrained(folder / "model")
posterior.perturb_(model.named_parameters(), posterior.address(0))  # the model is now a sample
with torch.no_grad():
    drawn = float(model(input_ids=counting, labels=counting).loss)
print(f"loss before {before:.3f}, after {after:.3f}; of a model drawn from the saved posterior {drawn:.3f}")
