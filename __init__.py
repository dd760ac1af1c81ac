"""Hookline: per-conditioning LoRA for ComfyUI."""
