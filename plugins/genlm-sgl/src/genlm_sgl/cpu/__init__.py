"""CPU-only support code for SGLang; not imported on a GPU."""
