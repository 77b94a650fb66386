import pytest

pytest.register_assert_rewrite("llmgw.testing.conformance")
