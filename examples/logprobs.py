"""The log probability of each token, and the alternatives at its position."""

import math

from quire_client import Client

with Client() as client:
    result = client.chat("What does len do?", temperature=0, max_tokens=8, logprobs=3)
    for token in result.samples[0].logprobs:
        others = ", ".join(f"{top.token.decode(errors='replace')!r} {math.exp(top.logprob):.1%}" for top in token.top)
        print(f"{token.token.decode(errors='replace')!r:>14} {math.exp(token.logprob):7.1%}   of {others}")
