# Two commands: `make demo` (the main job) and `make test` (everything CI checks). Each sets up .venv by itself.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SHORT  := trainer.max_steps=3 trainer.limit_val_batches=0 callbacks.checkpoint=null callbacks.loss_plot=null callbacks.text_sample=null

.PHONY: demo memory-chart pipeline-chart long-context-chart moe-chart test lint bench clean
.DEFAULT_GOAL := help

help: ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# torch is named with its version in the install command itself: an open range may bring a build of several gigabytes.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0 --editable '.[dev,hf,slurm]'
	touch $(READY)

demo: $(READY) ## train a small language model on 2 processes, ZeRO-1, under three minutes
	$(BIN)/fived train

memory-chart: $(READY) ## draw the memory of ZeRO-1 in fp16 on 2 processes, in half a minute
	$(BIN)/fived train recipe=zero1_memory_chart

pipeline-chart: $(READY) ## draw what a pipeline of 4 processes really does, in half a minute; SCHEDULE=zb_v for another schedule
	$(BIN)/fived train recipe=pipeline_demo pipeline.schedule=$(or $(SCHEDULE),1f1b)

long-context-chart: $(READY) ## draw the memory of one long sequence in one process beside four ranks that share it, in a minute
	$(BIN)/fived train recipe=long_context context.size=1 $(SHORT) hydra.run.dir=outputs/long_context/one_process
	$(BIN)/fived train recipe=long_context $(SHORT) hydra.run.dir=outputs/long_context/four_ranks
	$(BIN)/python -m lightning_5d.memory outputs/long_context/one_process/memory "Sequences of 2048 tokens: one process, and four ranks of a context axis" --beside outputs/long_context/four_ranks/memory

moe-chart: $(READY) ## train a mixture of experts on 2 processes and draw the load of each expert, in under a minute
	$(BIN)/fived train recipe=moe_demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two processes: ranks of a test wait for each other most of the time. Worksteal: a module's tests stay together, mostly.
test: $(READY) lint ## lint, types and the whole test suite
	$(BIN)/python -m pytest -m "not alone" --numprocesses 2 --dist worksteal
	$(BIN)/python -m pytest -m alone $$(grep -rl mark.alone --include='test_*.py' tests)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
