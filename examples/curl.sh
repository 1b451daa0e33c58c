#!/usr/bin/env bash
# The HTTP API with curl: models, a chat, a stream.
set -euo pipefail
url=${QUIRE_BASE_URL:-http://localhost:8000}
ask() {
  curl --silent --show-error --fail-with-body --no-buffer --header "authorization: Bearer ${QUIRE_API_KEY:-none}" "$@"
  echo
}

ask "$url/v1/models"
ask "$url/v1/chat/completions" --json '{"messages": [{"role": "user", "content": "What does len do?"}], "temperature": 0}'
ask "$url/v1/completions" --json '{"prompt": "def ", "max_tokens": 8, "stream": true}'
