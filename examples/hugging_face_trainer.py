"""The Hugging Face Trainer: the optimizer is handed over ready-made, and armed while the trainer runs.

``python hugging_face_trainer.py inductor`` (or ``aot_eager``, without a C++ compiler) compiles the model.
"""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import hesscale


class Parity(Dataset[dict[str, torch.Tensor]]):
    """Sequences of ones and twos, labeled by which of them comes first."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(1, 3, (count, 6))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": (self.tokens[index, 0] == 2).long()}


torch.manual_seed(0)
data = Parity(256)
config = BertConfig(
    vocab_size=3, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=2
)
model = BertForSequenceClassification(config)
if len(sys.argv) > 1:
    model.compile(backend="hesscale", options={"backend": sys.argv[1]})
optimizer = hesscale.AdaHesScaleGN(model.parameters(), lr=1e-3)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        num_train_epochs=6,
        per_device_train_batch_size=32,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
    with optimizer.armed():  # every backward pass in here fills p.curvature
        trainer.train()

model.eval()
with torch.no_grad():
    guess = model(input_ids=data.tokens).logits.argmax(1)
accuracy = (guess == (data.tokens[:, 0] == 2)).float().mean().item()
print(f"accuracy {accuracy:.3f}")
