"""The mailbox matches messages and receives as a simple model with lists does."""

from hypothesis import given
from hypothesis import strategies as st

from popdist_py.torch_backend.messages.mailbox import Mailbox

_SOURCES, _TAGS = st.integers(0, 2), st.integers(0, 1)
_steps = st.one_of(
    st.tuples(st.just("deliver"), _SOURCES, _TAGS),
    st.tuples(st.just("post"), st.one_of(st.none(), _SOURCES), _TAGS),
    st.tuples(st.just("withdraw"), st.integers(0, 20), st.just(0)),
)


class _PlainMailbox:
    """A simple model of the mailbox."""

    def __init__(self):
        self.messages, self.receives = [], []

    def deliver(self, message, source, tag):
        for entry in self.receives:
            if entry[1] in (source, None) and entry[2] == tag:
                self.receives.remove(entry)
                return entry[0]
        self.messages.append((message, source, tag))
        return None

    def post(self, receive, source, tag):
        for entry in self.messages:
            if source in (entry[1], None) and entry[2] == tag:
                self.messages.remove(entry)
                return entry[0]
        self.receives.append((receive, source, tag))
        return None

    def withdraw(self, receive, source, tag):
        self.receives = [entry for entry in self.receives if entry[0] is not receive]


@given(st.lists(_steps, max_size=40))
def test_every_message_finds_its_receive(steps):
    ours, plain = Mailbox(), _PlainMailbox()
    posted = []
    for number, (call, who, tag) in enumerate(steps):
        if call == "withdraw":
            if posted:
                receive = posted[who % len(posted)]
                ours.withdraw(*receive)
                plain.withdraw(*receive)
            continue
        value = f"{call} {number}"
        if call == "post":
            posted.append((value, who, tag))
        assert getattr(ours, call)(value, who, tag) == getattr(plain, call)(value, who, tag)
