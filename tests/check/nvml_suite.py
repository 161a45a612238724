"""Checks for everything that answers in the place of NVML."""

import json

from tests.check.nvml_fake import H100, HOST, record


def check_forms(nvml):
    """Each answer has the form of an H100's, or is refused with a number and words."""
    answers = record(nvml)
    hosts = [(answers["host"], HOST), *((gpu, H100) for gpu in answers["gpus"])]
    for answered, usual in hosts:
        for question, answer in answered.items():
            if isinstance(answer, dict) and "error" in answer:
                assert answer["error"] > 0
                assert answer["reason"]
            else:
                assert has_form(answer, usual[question]), (question, answer)


def has_form(answer, usual):
    if isinstance(usual, dict):
        return answer.keys() == usual.keys() and all(
            has_form(answer[name], each) for name, each in usual.items()
        )
    if isinstance(usual, list):
        return not usual or all(has_form(each, usual[0]) for each in answer)
    return type(answer) is type(usual) and answer != ""


def check_record(nvml):
    """All answers are the same after JSON."""
    answers = record(nvml)
    assert json.loads(json.dumps(answers)) == answers
    assert len(answers["gpus"]) == nvml.ask_host("count")


SUITE = (check_forms, check_record)
