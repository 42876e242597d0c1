#!/usr/bin/env bash
# Evaluators and load generators of others, unchanged, against a server of a tiny model: lm-eval (choices and generation), guidellm, aiperf.
# Each gets an environment of its own, as their dependencies exclude each other.
#
#   bash tests/server/clients.sh [FOLDER of the environments, kept; default: a temporary one]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d) envs=${1:-$work/envs} port=8167
trap 'kill "${server:-}" 2>/dev/null || true; rm -rf "$work"' EXIT

environment() {  # NAME PACKAGE...: makes it once
  [ -x "$envs/$1/bin/python" ] || { python3 -m venv "$envs/$1" && "$envs/$1/bin/pip" install -q "${@:2}"; }
}
environment lm-eval "lm-eval[api]" transformers
environment guidellm guidellm
environment aiperf aiperf

cd "$work"
PYTHONPATH=$root/tests/helpers python -c '
from pathlib import Path
from chat_models import make_chat_model
make_chat_model(Path("tiny"), max_position_embeddings=2048)'
trivium serve tiny=./tiny --backend reference --port $port & server=$!
for _ in $(seq 60); do curl -fs "http://127.0.0.1:$port/health" > /dev/null && break; sleep 1; done

mkdir tasks
echo '{"q": "one and one is", "choices": [" two", " three"], "answer": 0}' > tasks/data.jsonl
common="dataset_path: json
dataset_kwargs: {data_files: {test: $work/tasks/data.jsonl}}
test_split: test
doc_to_text: '{{q}}'"
printf '%s\n' 'task: choices' "$common" 'output_type: multiple_choice' "doc_to_choice: '{{choices}}'" 'doc_to_target: answer' \
  'metric_list: [{metric: acc}]' > tasks/choices.yaml
printf '%s\n' 'task: answers' "$common" 'output_type: generate_until' "doc_to_target: '{{choices[answer]}}'" \
  'generation_kwargs: {max_gen_toks: 8, until: ["."]}' 'metric_list: [{metric: exact_match}]' > tasks/answers.yaml
echo "== lm-eval"
"$envs/lm-eval/bin/lm_eval" --model local-completions --tasks choices,answers --include_path tasks --model_args \
  "model=tiny,base_url=http://127.0.0.1:$port/v1/completions,tokenizer=$work/tiny,num_concurrent=2,tokenized_requests=False"

echo "== guidellm"
"$envs/guidellm/bin/guidellm" run --backend "kind=openai_http,target=http://127.0.0.1:$port" --profile kind=synchronous \
  --constraint kind=max_requests,count=4 --tokenizer "kind=hf_auto,model=$work/tiny" \
  --data kind=synthetic_text,prompt_tokens=16,output_tokens=8 --disable-console-interactive

echo "== aiperf"
"$envs/aiperf/bin/aiperf" profile --model tiny --url "http://127.0.0.1:$port" --endpoint-type chat --streaming --tokenizer ./tiny \
  --artifact-dir "$work/aiperf" --request-count 6 --concurrency 2 --isl 16 --osl 8 --ui simple
echo "all clients were served"
