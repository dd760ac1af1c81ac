# Every target does its own set-up: only Python 3.10+ and PyPI are needed.

PYTHON ?= python3
VENV := .venv
COMFY_VENV := .venv-comfyui
COMFYUI := $(or $(COMFYUI_PATH),$(wildcard $(HOME)/comfy/ComfyUI))

.PHONY: demo test test-embedded test-comfyui comfyui-if-found lint format train workflows clean

demo: $(VENV)/.ready
	$(VENV)/bin/python -m hookline run example_workflows/api/two_regions.json --out output --report output/report.json

test: lint test-embedded comfyui-if-found

test-embedded: $(VENV)/.ready
	$(VENV)/bin/pytest -q

comfyui-if-found:
ifneq ($(COMFYUI),)
	$(MAKE) test-comfyui
else
	@echo "Skipped: the same tests on ComfyUI. Set COMFYUI_PATH (or put a checkout into ~/comfy/ComfyUI) and run 'make test-comfyui'."
endif

test-comfyui: $(COMFY_VENV)/.ready
	HOOKLINE_TEST_HOST=comfyui COMFYUI_PATH=$(COMFYUI) $(COMFY_VENV)/bin/python -m pytest -q tests/host tests/workflows

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.ready
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

train: $(VENV)/.ready
	$(VENV)/bin/python -m hookline.assets.train

workflows: $(VENV)/.ready
	$(VENV)/bin/python example_workflows/make.py

clean:
	rm -rf $(VENV) $(COMFY_VENV) build output *.egg-info

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q -e '.[test]'
	touch $@

# ComfyUI's requirements in an environment of their own, on top of the first one's packages so that torch is not
# installed twice. torchaudio is left out: nothing here uses it, and an empty package satisfies the imports.
$(COMFY_VENV)/.ready: $(VENV)/.ready
	test -n "$(COMFYUI)" || (echo "ComfyUI not found: set COMFYUI_PATH" && false)
	$(PYTHON) -m venv $(COMFY_VENV)
	echo "import site; site.addsitedir('$(wildcard $(abspath $(VENV))/lib/python*/site-packages)')" > $(COMFY_VENV)/base.pth
	mv $(COMFY_VENV)/base.pth $(COMFY_VENV)/lib/python*/site-packages/
	grep -v '^torch' $(COMFYUI)/requirements.txt > $(COMFY_VENV)/requirements.txt
	$(COMFY_VENV)/bin/pip install -q -r $(COMFY_VENV)/requirements.txt
	$(COMFY_VENV)/bin/pip install -q torchsde torchvision
	touch $@
