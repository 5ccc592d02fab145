"""Move the inference state of a hybrid language model into a bigger one."""
