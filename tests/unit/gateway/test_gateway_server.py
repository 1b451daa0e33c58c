"""Settings that fail the start of a gateway."""

import pytest

from gateway_svc.flags import make_parser
from svc_common.config import parse
from svc_common.redis.server import RedisSettingsError, redis_server


@pytest.mark.parametrize("url", ["redis://:s3cret@cache:notaport/0", "redis://:s3cret/x@cache", "http://:s3cret@cache"])
def test_a_bad_redis_url_is_named_without_its_password(url: str) -> None:
    args = parse(make_parser(), ["--scheduler", "a:1", "--redis", url])
    with pytest.raises(RedisSettingsError, match=r"--redis '[a-z]+://\*\*\*@cache.*write redis://") as caught:
        redis_server(args)
    assert "s3cret" not in str(caught.value)
