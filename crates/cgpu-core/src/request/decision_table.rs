//! What becomes of a bundle by what it says of GPUs: one table, [`ROWS`].
//!
//! [`find`] classifies nothing itself: the three columns are facts about a bundle that
//! [`decide()`](super::decide()) has read, and the first row that matches them is the outcome. The same
//! rows are the table of `docs/compatibility.md` ([`markdown`]) and the cases of the tests. Pure.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::brought_gpus::Extent;

/// What a bundle asks for by way of a quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Quota {
    /// Nothing.
    Unasked,
    /// A quota.
    Asked,
    /// A quota that `CGPU_DISABLE` next to it lifts.
    Lifted,
    /// An empty or zero amount, by which the documents mean the default NVIDIA service.
    Zero,
    /// A quota by a source that the configuration does not trust.
    Untrusted,
    /// A quota by a pod's annotations, in the pod's sandbox.
    Sandbox,
}

/// Which GPUs a bundle names, by variables and annotations together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Named {
    /// Nothing speaks of GPUs.
    Unsaid,
    /// No GPU: `void`, or nothing behind the name.
    NoGpu,
    /// `none`: the driver's files and no GPU.
    Files,
    /// `all`.
    All,
    /// A number, or a quota by the neutral names and nothing that says which.
    Counted,
    /// A list.
    Listed,
}

/// Which GPUs a container has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum On {
    /// Those that are named.
    Named,
    /// As many as are asked for, which cgpu chooses.
    Chosen,
    /// Those that were brought.
    Brought,
    /// Those that are named, which have to be those that were brought.
    Both,
    /// Those that are named, and those that were brought.
    Either,
}

/// What becomes of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It is started as the bare runtime would, and not registered.
    NotOurs,
    /// It gets the driver's files and no GPU.
    FilesAlone,
    /// It has a part of each of these GPUs.
    Quota(On),
    /// Its use of these GPUs is unlimited.
    Whole(On),
    /// Its use of what was brought is unlimited: it is registered, and its bundle isn't changed.
    AsBrought,
    /// It is not started.
    Refused(Because),
}

/// Why a bundle is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Because {
    /// It has GPUs and no quota.
    NoQuota,
    /// It has GPUs, and a setting lifts the quota.
    Lifted,
    /// It asks for a quota on no GPU, and every device was brought.
    NoGpuNamed,
    /// The quota comes from a source that isn't trusted.
    Untrusted,
    /// A sandbox has GPUs.
    Sandbox,
}

/// A row: it matches if each of its columns has the bundle's value.
#[derive(Debug)]
pub struct Row {
    /// What is asked for.
    pub quota: &'static [Quota],
    /// What is named.
    pub named: &'static [Named],
    /// What was brought.
    pub brought: &'static [Extent],
    /// The outcome under `profile = "open"`.
    pub open: Outcome,
    /// The outcome under `profile = "strict"`.
    pub strict: Outcome,
}

const ANY_NAMED: &[Named] =
    &[Named::Unsaid, Named::NoGpu, Named::Files, Named::All, Named::Counted, Named::Listed];
const ANY_BROUGHT: &[Extent] = &[Extent::Nothing, Extent::Gpus, Extent::Everything];
const NO_GPU_NAMED: &[Named] = &[Named::Unsaid, Named::NoGpu, Named::Files];
const GPUS_NAMED: &[Named] = &[Named::All, Named::Counted, Named::Listed];
const LIFTED: &[Quota] = &[Quota::Lifted, Quota::Zero];

/// The table. The first row that matches counts.
pub static ROWS: &[Row] = &[
    Row {
        quota: &[Quota::Asked],
        named: &[Named::Listed],
        brought: &[Extent::Gpus],
        open: Outcome::Quota(On::Both),
        strict: Outcome::Quota(On::Both),
    },
    Row {
        quota: &[Quota::Asked],
        named: &[Named::Listed],
        brought: &[Extent::Nothing, Extent::Everything],
        open: Outcome::Quota(On::Named),
        strict: Outcome::Quota(On::Named),
    },
    Row {
        quota: &[Quota::Asked],
        named: &[Named::Unsaid, Named::NoGpu, Named::Files, Named::All, Named::Counted],
        brought: &[Extent::Gpus],
        open: Outcome::Quota(On::Brought),
        strict: Outcome::Quota(On::Brought),
    },
    Row {
        quota: &[Quota::Asked],
        named: &[Named::Counted],
        brought: &[Extent::Nothing, Extent::Everything],
        open: Outcome::Quota(On::Chosen),
        strict: Outcome::Quota(On::Chosen),
    },
    Row {
        quota: &[Quota::Asked],
        named: &[Named::Unsaid, Named::All],
        brought: &[Extent::Nothing, Extent::Everything],
        open: Outcome::Quota(On::Named),
        strict: Outcome::Quota(On::Named),
    },
    Row {
        quota: &[Quota::Asked],
        named: &[Named::NoGpu, Named::Files],
        brought: &[Extent::Everything],
        open: Outcome::Refused(Because::NoGpuNamed),
        strict: Outcome::Refused(Because::NoGpuNamed),
    },
    Row {
        quota: &[Quota::Asked],
        named: &[Named::NoGpu, Named::Files],
        brought: &[Extent::Nothing],
        open: Outcome::NotOurs,
        strict: Outcome::NotOurs,
    },
    Row {
        quota: &[Quota::Untrusted],
        named: GPUS_NAMED,
        brought: ANY_BROUGHT,
        open: Outcome::Refused(Because::Untrusted),
        strict: Outcome::Refused(Because::Untrusted),
    },
    Row {
        quota: &[Quota::Untrusted],
        named: NO_GPU_NAMED,
        brought: &[Extent::Gpus, Extent::Everything],
        open: Outcome::Refused(Because::Untrusted),
        strict: Outcome::Refused(Because::Untrusted),
    },
    Row {
        quota: &[Quota::Sandbox],
        named: GPUS_NAMED,
        brought: ANY_BROUGHT,
        open: Outcome::Refused(Because::Sandbox),
        strict: Outcome::Refused(Because::Sandbox),
    },
    Row {
        quota: &[Quota::Sandbox],
        named: NO_GPU_NAMED,
        brought: &[Extent::Gpus],
        open: Outcome::Refused(Because::Sandbox),
        strict: Outcome::Refused(Because::Sandbox),
    },
    Row {
        quota: LIFTED,
        named: &[Named::Listed],
        brought: ANY_BROUGHT,
        open: Outcome::Whole(On::Either),
        strict: Outcome::Refused(Because::Lifted),
    },
    Row {
        quota: LIFTED,
        named: &[Named::All, Named::Counted],
        brought: &[Extent::Gpus],
        open: Outcome::Whole(On::Brought),
        strict: Outcome::Refused(Because::Lifted),
    },
    Row {
        quota: LIFTED,
        named: &[Named::Counted],
        brought: &[Extent::Nothing, Extent::Everything],
        open: Outcome::Whole(On::Chosen),
        strict: Outcome::Refused(Because::Lifted),
    },
    Row {
        quota: LIFTED,
        named: &[Named::All],
        brought: &[Extent::Nothing, Extent::Everything],
        open: Outcome::Whole(On::Named),
        strict: Outcome::Refused(Because::Lifted),
    },
    Row {
        quota: LIFTED,
        named: NO_GPU_NAMED,
        brought: &[Extent::Gpus, Extent::Everything],
        open: Outcome::AsBrought,
        strict: Outcome::Refused(Because::Lifted),
    },
    Row {
        quota: &[Quota::Unasked],
        named: &[Named::Listed],
        brought: ANY_BROUGHT,
        open: Outcome::Whole(On::Either),
        strict: Outcome::Refused(Because::NoQuota),
    },
    Row {
        quota: &[Quota::Unasked],
        named: &[Named::All, Named::Counted],
        brought: &[Extent::Gpus],
        open: Outcome::Whole(On::Brought),
        strict: Outcome::Refused(Because::NoQuota),
    },
    Row {
        quota: &[Quota::Unasked],
        named: &[Named::Counted],
        brought: &[Extent::Nothing, Extent::Everything],
        open: Outcome::Whole(On::Chosen),
        strict: Outcome::Refused(Because::NoQuota),
    },
    Row {
        quota: &[Quota::Unasked],
        named: &[Named::All],
        brought: &[Extent::Nothing, Extent::Everything],
        open: Outcome::Whole(On::Named),
        strict: Outcome::Refused(Because::NoQuota),
    },
    Row {
        quota: &[Quota::Unasked],
        named: NO_GPU_NAMED,
        brought: &[Extent::Gpus],
        open: Outcome::AsBrought,
        strict: Outcome::Refused(Because::NoQuota),
    },
    Row {
        quota: &[Quota::Unasked, Quota::Lifted, Quota::Zero, Quota::Untrusted],
        named: &[Named::Files],
        brought: &[Extent::Nothing, Extent::Everything],
        open: Outcome::FilesAlone,
        strict: Outcome::FilesAlone,
    },
    Row {
        quota: &[Quota::Unasked, Quota::Lifted, Quota::Zero, Quota::Untrusted, Quota::Sandbox],
        named: NO_GPU_NAMED,
        brought: &[Extent::Nothing, Extent::Everything],
        open: Outcome::NotOurs,
        strict: Outcome::NotOurs,
    },
];

/// The row of these facts.
#[must_use]
pub fn find(quota: Quota, named: Named, brought: Extent) -> &'static Row {
    let matches = |row: &&Row| {
        row.quota.contains(&quota) && row.named.contains(&named) && row.brought.contains(&brought)
    };
    ROWS.iter().find(matches).expect("a test tries all facts: each has a row")
}

/// The table as Markdown.
#[must_use]
pub fn markdown() -> String {
    let mut text = String::from(
        "| quota | GPUs named | GPUs brought | `profile = \"open\"` | `profile = \"strict\"` |\n\
         |---|---|---|---|---|\n",
    );
    for row in ROWS {
        let quotas: Vec<&str> = row.quota.iter().map(|quota| quota.text()).collect();
        let named: Vec<&str> = row.named.iter().map(|named| named.text()).collect();
        let brought: Vec<&str> = row.brought.iter().map(|brought| brought.text()).collect();
        let [open, strict] = [row.open, row.strict].map(|outcome| outcome.text(row));
        let strict = if row.open == row.strict { "the same".to_owned() } else { strict };
        let of = |values: &[&str], all: usize| match values.len() == all {
            true => "any".to_owned(),
            false => values.join(", "),
        };
        text.push_str(&format!(
            "| {} | {} | {} | {open} | {strict} |\n",
            quotas.join(", "),
            of(&named, ANY_NAMED.len()),
            of(&brought, ANY_BROUGHT.len()),
        ));
    }
    text
}

impl Quota {
    /// As the table has it.
    fn text(self) -> &'static str {
        match self {
            Quota::Unasked => "not asked for",
            Quota::Asked => "asked for",
            Quota::Lifted => "lifted by `CGPU_DISABLE`",
            Quota::Zero => "empty or 0",
            Quota::Untrusted => "from an untrusted source",
            Quota::Sandbox => "of the pod, in its sandbox",
        }
    }
}

impl Named {
    fn text(self) -> &'static str {
        match self {
            Named::Unsaid => "not said",
            Named::NoGpu => "`void` or empty",
            Named::Files => "`none`",
            Named::All => "`all`",
            Named::Counted => "how many",
            Named::Listed => "a list",
        }
    }
}

impl Extent {
    fn text(self) -> &'static str {
        match self {
            Extent::Nothing => "none",
            Extent::Gpus => "one by one",
            Extent::Everything => "all at once",
        }
    }
}

impl Outcome {
    fn text(self, row: &Row) -> String {
        let lifted = row.quota.iter().all(|quota| LIFTED.contains(quota));
        let is_unnamed = row.named.contains(&Named::Unsaid);
        let unenforced = if lifted { "; reported as `unenforced`" } else { "" };
        match self {
            Outcome::NotOurs => "untouched".to_owned(),
            Outcome::FilesAlone => "the driver's files, no GPU".to_owned(),
            Outcome::Quota(on) => match on {
                On::Named if is_unnamed => "a quota on each GPU of the host",
                On::Named => "a quota on each named GPU; others are withheld",
                On::Chosen => "a quota on each GPU that cgpu chooses; others are withheld",
                On::Brought => "a quota on each brought GPU",
                On::Both | On::Either => {
                    "a quota on each, if both are the same GPUs; else **refused**"
                }
            }
            .to_owned(),
            Outcome::Whole(on) => {
                let which = match on {
                    On::Named => "the named GPUs",
                    On::Chosen => "GPUs that cgpu chooses",
                    On::Brought => "the brought GPUs",
                    On::Both | On::Either => "the named and the brought GPUs",
                };
                format!("{which}, whole{unenforced}")
            }
            Outcome::AsBrought => {
                format!("the brought GPUs, whole; the bundle stays as it is{unenforced}")
            }
            Outcome::Refused(because) => format!("**refused**: {}", because.text()),
        }
    }
}

impl Because {
    fn text(self) -> &'static str {
        match self {
            Because::NoQuota => "GPUs without a quota",
            Because::Lifted => "GPUs, and a setting that lifts their quota",
            Because::NoGpuNamed => "a quota on no GPU, and every device at hand",
            Because::Untrusted => "the quota can't be ignored beside GPUs",
            Because::Sandbox => "a sandbox uses no GPU",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUOTAS: [Quota; 6] = [
        Quota::Unasked,
        Quota::Asked,
        Quota::Lifted,
        Quota::Zero,
        Quota::Untrusted,
        Quota::Sandbox,
    ];

    fn all() -> impl Iterator<Item = (Quota, Named, Extent)> {
        let of = |quota| {
            let named = ANY_NAMED.iter();
            named.flat_map(move |named| ANY_BROUGHT.iter().map(move |by| (quota, *named, *by)))
        };
        QUOTAS.into_iter().flat_map(of)
    }

    /// All facts have a row, and each row has facts that find it.
    #[test]
    fn facts_and_table_rows_cover_each_other() {
        let mut found: Vec<bool> = ROWS.iter().map(|_| false).collect();
        for (quota, named, brought) in all() {
            let row = find(quota, named, brought);
            let at = ROWS.iter().position(|other| std::ptr::eq(row, other)).unwrap();
            found[at] = true;
        }
        assert_eq!(found.iter().position(|found| !found), None, "a row that nothing finds");
    }

    /// The rule of the table itself: a container that asks for a quota and has GPUs at hand gets it, or isn't
    /// started, but for the rows that are reported.
    #[test]
    fn a_quota_is_enforced_refused_or_reported() {
        for (quota, named, brought) in all() {
            let row = find(quota, named, brought);
            let has_gpus = brought != Extent::Nothing || GPUS_NAMED.contains(&named);
            for (outcome, profile) in [(row.open, "open"), (row.strict, "strict")] {
                let is_retained = match quota {
                    Quota::Asked => matches!(outcome, Outcome::Quota(_) | Outcome::Refused(_)),
                    Quota::Untrusted => matches!(outcome, Outcome::Refused(_)),
                    // A sandbox's pod has the quota in its other containers.
                    Quota::Sandbox => !matches!(outcome, Outcome::Whole(_) | Outcome::AsBrought),
                    Quota::Lifted | Quota::Zero => {
                        profile == "open" || matches!(outcome, Outcome::Refused(_))
                    }
                    Quota::Unasked => true,
                };
                let none = matches!(outcome, Outcome::NotOurs | Outcome::FilesAlone);
                assert!(
                    is_retained || (!has_gpus && none),
                    "{quota:?} {named:?} {brought:?} {profile}: {outcome:?}"
                );
            }
        }
    }

    #[test]
    fn strict_allows_nothing_that_open_refuses() {
        for row in ROWS {
            assert!(row.open == row.strict || matches!(row.strict, Outcome::Refused(_)), "{row:?}");
        }
    }
}
