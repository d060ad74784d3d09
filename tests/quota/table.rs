//! The attacks that must fail: what `rmtool` plays, and what is promised of each. Tests play them
//! alone (`attacks`), the bench next to a neighbour (`benches/neighbour.rs`).

pub(crate) const QUOTA_MIB: u64 = 500;

/// What the gate promises of an attack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Promise {
    /// It never holds more than the quota.
    Never,
    /// It may for less than a second, and has no more after that.
    Briefly,
    /// It may for less than a second, and then is killed.
    Killed,
}

/// What an attack does if no quota is enforced, by which it's known for one that could win.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unheld {
    /// It holds more.
    Exceeds,
    /// It says that it could: the driver usage does not show that.
    Claims,
    /// Nothing else: it's not about more memory. The attack checks what it is about itself, and fails
    /// if that isn't so: that nonsense is refused and the next call works, that there is no
    /// handler or none unwraps twice, that what was given up can be had again.
    Checks,
}

/// Its arguments, what is promised, how often it gets as far as what it is about at least, and
/// what it does without the gate.
pub(crate) type Row = (&'static [&'static str], Promise, u64, Unheld);

pub(crate) const ATTACKS: &[Row] = &[
    (&["race-size"], Promise::Never, 20, Unheld::Exceeds),
    (&["race-class"], Promise::Never, 20, Unheld::Exceeds),
    (&["race-pointer"], Promise::Never, 20, Unheld::Exceeds),
    (&["dup2-ioctl"], Promise::Never, 10, Unheld::Exceeds),
    (&["dup2-mmap"], Promise::Killed, 1, Unheld::Exceeds),
    (&["dup2-range"], Promise::Briefly, 1, Unheld::Exceeds),
    (&["dup2-inherited"], Promise::Killed, 1, Unheld::Exceeds),
    (&["name-race"], Promise::Never, 1, Unheld::Exceeds),
    (&["dup2-maker"], Promise::Never, 10, Unheld::Claims),
    (&["remap"], Promise::Never, 1, Unheld::Exceeds),
    (&["class-in-client"], Promise::Killed, 1, Unheld::Exceeds),
    (&["swap-control"], Promise::Never, 1, Unheld::Exceeds),
    (&["swap-control", "xfer"], Promise::Never, 1, Unheld::Exceeds),
    (&["parent-free"], Promise::Never, 100, Unheld::Exceeds),
    (&["managed"], Promise::Never, 1, Unheld::Exceeds),
    (&["managed-nofixed"], Promise::Never, 1, Unheld::Exceeds),
    (&["barrier16", "100MiB"], Promise::Never, 5, Unheld::Exceeds),
    (&["clients", "10000"], Promise::Never, 10000, Unheld::Exceeds),
    (&["handle-reuse"], Promise::Never, 200, Unheld::Exceeds),
    (&["hostile-sizes", "500MiB"], Promise::Never, 4, Unheld::Exceeds),
    (&["bad-pointers"], Promise::Never, 14, Unheld::Checks),
    (&["control-params"], Promise::Never, 19, Unheld::Checks),
    (&["interrupt"], Promise::Never, 50, Unheld::Exceeds),
    (&["signal-storm"], Promise::Never, 100, Unheld::Exceeds),
    (&["sigstop-self"], Promise::Never, 50, Unheld::Exceeds),
    (&["kill-during-alloc"], Promise::Never, 50, Unheld::Exceeds),
    (&["ptrace-sibling"], Promise::Never, 100, Unheld::Exceeds),
    (&["xfer"], Promise::Never, 1, Unheld::Exceeds),
    (&["xfer-nested"], Promise::Never, 1, Unheld::Checks),
    (&["type-byte"], Promise::Never, 16, Unheld::Exceeds),
    (&["int80"], Promise::Never, 1, Unheld::Exceeds),
    (&["upper-garbage"], Promise::Never, 1, Unheld::Exceeds),
    (&["io-uring"], Promise::Never, 1, Unheld::Checks),
    (&["dup-free"], Promise::Never, 7, Unheld::Exceeds),
    (&["map-free"], Promise::Never, 7, Unheld::Exceeds),
    (&["map-hide", "file"], Promise::Never, 1, Unheld::Exceeds),
    (&["map-hide", "page"], Promise::Never, 1, Unheld::Exceeds),
    (&["map-hide", "over"], Promise::Never, 1, Unheld::Exceeds),
    (&["map-hide", "fork"], Promise::Never, 6, Unheld::Exceeds),
    (&["map-hide", "socket"], Promise::Never, 6, Unheld::Exceeds),
    (&["export-free"], Promise::Never, 7, Unheld::Exceeds),
    (&["export-free", "close"], Promise::Never, 32, Unheld::Checks),
    (&["export-free", "socket"], Promise::Never, 32, Unheld::Exceeds),
    (&["hide-dup"], Promise::Briefly, 1, Unheld::Exceeds),
    (&["hide-map"], Promise::Briefly, 1, Unheld::Exceeds),
    (&["hide-slack"], Promise::Killed, 1, Unheld::Exceeds),
    (&["hide-slack", "export"], Promise::Killed, 1, Unheld::Exceeds),
    (&["hide-slack", "busy"], Promise::Killed, 1, Unheld::Exceeds),
    (&["hide-slack", "closed"], Promise::Killed, 1, Unheld::Exceeds),
    (&["hide-slack", "mapped"], Promise::Killed, 1, Unheld::Exceeds),
    (&["hide-slack", "closing"], Promise::Killed, 1, Unheld::Exceeds),
    (&["hide-slack", "anew"], Promise::Killed, 1, Unheld::Exceeds),
    (&["hide-under", "export"], Promise::Briefly, 1, Unheld::Exceeds),
    (&["hide-under", "map"], Promise::Briefly, 1, Unheld::Exceeds),
    (&["hide-inherited"], Promise::Never, 1, Unheld::Exceeds),
    (&["hide-fabric"], Promise::Never, 1, Unheld::Exceeds),
    (&["hide-behind"], Promise::Briefly, 1, Unheld::Exceeds),
    (&["hide-behind", "nothing"], Promise::Briefly, 1, Unheld::Exceeds),
    (&["export-reuse"], Promise::Never, 1, Unheld::Exceeds),
    (&["export-reuse", "list"], Promise::Never, 1, Unheld::Exceeds),
    (&["vfork-exec"], Promise::Never, 1, Unheld::Exceeds),
    (&["close-range"], Promise::Never, 1, Unheld::Exceeds),
];

/// rmtool's arguments of an attack.
pub(crate) fn words_of<'a>(words: &[&'a str]) -> Vec<&'a str> {
    [&["--quota", "500MiB", "--held", "attack"], words].concat()
}
