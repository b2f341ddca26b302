"""The choice between two ways of reducing large arrays, from times that the test gives."""

from popdist_py.collectives.within_host.reading_trial import ReadingTrial


def tried(times):
    trial = ReadingTrial()
    for through_slots, reading in times:
        assert not trial.is_over
        assert not trial.reading_is_faster
        trial.add([through_slots, through_slots], [reading, reading])
    return trial


def test_the_faster_way_is_taken_after_six_calls():
    assert tried([(9, 8)] * 6).reading_is_faster
    slower = tried([(8, 9)] * 6)
    assert slower.is_over
    assert not slower.reading_is_faster


def test_calls_that_were_disturbed_do_not_count():
    assert tried([(9, 800), *[(9, 8)] * 5]).reading_is_faster
    assert not tried([(900, 9), *[(8, 9)] * 5]).reading_is_faster


def test_the_times_of_all_instances_are_added():
    trial = ReadingTrial()
    for _ in range(6):
        trial.add([10, 10], [1, 30])
    assert not trial.reading_is_faster


def test_reading_has_to_be_faster_by_the_least_gain():
    for reading, is_faster in ((8, False), (7, True)):
        trial = ReadingTrial(least_gain=1.25)
        for _ in range(6):
            trial.add([10], [reading])
        assert trial.reading_is_faster == is_faster
