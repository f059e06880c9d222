"""What SGLang needs on a CPU only; not imported where it runs on a GPU."""
