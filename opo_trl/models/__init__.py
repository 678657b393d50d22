"""The models of a run: policy, adapter and reference, and weights on their way to vLLM."""
