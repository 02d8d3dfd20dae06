"""An exported model as MLflow serves it: token ids in, logits out. MLflow keeps a copy of this file with the
weights, so that loading a registered model needs transformers and torch, but not this program.

MLflow's own flavour for transformers does not serve as well: it stores a pipeline from text to text, refuses a model
without a tokenizer, which data sets with ids of their own do not have, and gives no logits.
"""

import mlflow.models
import numpy as np
import torch
from mlflow.pyfunc.model import PythonModel
from transformers import GPT2LMHeadModel


class Logits(PythonModel):
    """A GPT-2 in the Hugging Face format."""

    def load_context(self, context) -> None:
        """Load the weights."""
        self.model = GPT2LMHeadModel.from_pretrained(context.artifacts["model"]).eval()

    @torch.no_grad()
    def predict(self, context, model_input, params=None):  # MLflow would take type hints for a schema
        """Logits (batch, tokens, vocabulary), float32, of token ids (batch, tokens)."""
        return self.model(torch.as_tensor(np.asarray(model_input))).logits.numpy()


mlflow.models.set_model(Logits())
