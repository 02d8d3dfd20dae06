"""An exported model for MLflow's model serving, with token ids as input and logits as output.

MLflow stores a copy of this file with the weights, so that loading a registered model needs transformers and torch, but
not this program. MLflow's own flavor for transformers stores a pipeline from text to text. It does not return logits,
and it rejects a model without a tokenizer, such as a model of a data set with its own token ids.
"""

import mlflow.models
import numpy as np
import torch
from mlflow.pyfunc.model import PythonModel
from transformers import GPT2LMHeadModel


class Logits(PythonModel):
    """Predictions of a GPT-2 in the Hugging Face format."""

    def load_context(self, context) -> None:
        """Load the weights of the model."""
        self.model = GPT2LMHeadModel.from_pretrained(context.artifacts["model"]).eval()

    @torch.no_grad()
    def predict(self, context, model_input, params=None):  # without type hints, which MLflow would use as a schema
        """Return float32 logits of shape (batch, tokens, vocab_size) for token ids of shape (batch, tokens)."""
        return self.model(torch.as_tensor(np.asarray(model_input))).logits.numpy()


mlflow.models.set_model(Logits())
