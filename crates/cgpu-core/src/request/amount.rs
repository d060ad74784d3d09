//! Amounts of memory as people write them: sizes as docker and Kubernetes have them, and per cent of a GPU.
//!
//! Pure. Every unit is a power of 1024, as in docker's `--memory`: `4g`, `4G`, `4gb`, `4Gi` and `4GiB` are the same. A
//! bare number isn't an amount, because it doesn't say whether it means MiB or GiB.

use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use crate::units::MIB;

/// Bytes in one GiB.
pub(crate) const GIB: u64 = MIB << 10;

/// Parts of a GPU that a per cent has: amounts have two decimals.
const PARTS_OF_PER_CENT: u64 = 100;

/// What an amount of memory counts in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Measure {
    /// So many equal parts of the GPU's memory, at least 1.
    Parts(u64),
    /// Units of so many bytes, at least one MiB.
    UnitBytes(u128),
}

/// What a list of amounts says: numbers, and what they count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Amounts {
    /// At least one.
    pub(super) amounts: Vec<u64>,
    /// What they count in: MiB, or hundredths of a per cent.
    pub(super) measure: Measure,
}

/// Why a text is no list of amounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BadAmount<'a> {
    /// An item has no unit.
    Bare(&'a str),
    /// An item is no amount.
    Unreadable(&'a str),
    /// An item is less than a MiB, or than a hundredth of a per cent, and not 0.
    TooSmall(&'a str),
    /// An item is more than 100 %.
    MoreThanAll(&'a str),
    /// Sizes and per cent stand side by side.
    Mixed,
}

/// Reads `4GiB`, `25%` or a comma list of either.
pub(super) fn read(text: &str) -> Result<Amounts, BadAmount<'_>> {
    let mut found: Option<Amounts> = None;
    for item in text.split(',') {
        let (amount, measure) = one(item.trim())?;
        match &mut found {
            None => found = Some(Amounts { amounts: vec![amount], measure }),
            Some(list) if list.measure == measure => list.amounts.push(amount),
            Some(_) => return Err(BadAmount::Mixed),
        }
    }
    found.ok_or(BadAmount::Unreadable(text))
}

/// MiB of one size, as `4GiB`: for amounts that a configuration or a command has.
///
/// # Errors
///
/// Where it is no size, or less than a MiB and not 0.
pub fn size_mib(text: &str) -> Option<u64> {
    match one(text.trim()) {
        Ok((mib, Measure::UnitBytes(_))) => Some(mib),
        // Zero has no unit in it.
        Err(BadAmount::Bare(item)) if item.bytes().all(|byte| byte == b'0') => Some(0),
        _ => None,
    }
}

fn one(item: &str) -> Result<(u64, Measure), BadAmount<'_>> {
    let end = item.bytes().position(|b| !b.is_ascii_digit() && b != b'.').unwrap_or(item.len());
    let (number, unit) = item.split_at(end);
    let bad = BadAmount::Unreadable(item);
    let (thousandths, unit) = (thousandths(number).ok_or(bad)?, unit.trim_start());
    let is_none = thousandths == 0;
    if unit == "%" {
        // Ten of these are a hundredth of a per cent.
        let parts = thousandths / 10;
        return match u64::try_from(parts) {
            Ok(parts) if parts > 100 * PARTS_OF_PER_CENT => Err(BadAmount::MoreThanAll(item)),
            Ok(0) if !is_none => Err(BadAmount::TooSmall(item)),
            Ok(parts) => Ok((parts, Measure::Parts(100 * PARTS_OF_PER_CENT))),
            Err(_) => Err(BadAmount::MoreThanAll(item)),
        };
    }
    let unit_bytes = match unit.to_ascii_lowercase().as_str() {
        "" => return Err(BadAmount::Bare(item)),
        "b" => 1,
        "k" | "kb" | "ki" | "kib" => 1 << 10,
        "m" | "mb" | "mi" | "mib" => MIB,
        "g" | "gb" | "gi" | "gib" => GIB,
        "t" | "tb" | "ti" | "tib" => GIB << 10,
        _ => return Err(bad),
    };
    let bytes = thousandths.checked_mul(unit_bytes.into()).ok_or(bad)? / 1000;
    match u64::try_from(bytes / u128::from(MIB)) {
        Ok(0) if !is_none => Err(BadAmount::TooSmall(item)),
        Ok(mib) => Ok((mib, Measure::UnitBytes(MIB.into()))),
        Err(_) => Err(bad),
    }
}

/// A number with up to three decimals, in thousandths.
fn thousandths(text: &str) -> Option<u128> {
    let (whole, decimals) = text.split_once('.').unwrap_or((text, ""));
    if whole.is_empty() || decimals.len() > 3 || decimals.contains('.') {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    let decimals: u64 = format!("{decimals:0<3}").parse().ok()?;
    Some(u128::from(whole) * 1000 + u128::from(decimals))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB_EACH: Measure = Measure::UnitBytes(1 << 20);
    const HUNDREDTHS: Measure = Measure::Parts(10_000);

    #[test]
    fn sizes_parse_as_docker_and_kubernetes_write_them() {
        for (text, mib) in [
            ("4GiB", 4096),
            ("4Gi", 4096),
            ("4g", 4096),
            ("4G", 4096),
            ("4gb", 4096),
            ("4 GiB", 4096),
            ("4096MiB", 4096),
            ("4096m", 4096),
            ("4096Mi", 4096),
            ("1.5GiB", 1536),
            ("0.5g", 512),
            ("2.125g", 2176),
            ("4294967296b", 4096),
            ("4194304KiB", 4096),
            ("1t", 1 << 20),
            ("0GiB", 0),
        ] {
            let amounts = Amounts { amounts: vec![mib], measure: MIB_EACH };
            assert_eq!(read(text), Ok(amounts), "{text}");
            assert_eq!(size_mib(text), Some(mib));
        }
        assert_eq!(size_mib("0"), Some(0));
    }

    #[test]
    fn per_cent_have_two_decimals() {
        for (text, parts) in [("25%", 2500), ("100%", 10_000), ("12.5 %", 1250), ("0.01%", 1)] {
            let amounts = Amounts { amounts: vec![parts], measure: HUNDREDTHS };
            assert_eq!(read(text), Ok(amounts), "{text}");
            assert_eq!(size_mib(text), None);
        }
    }

    #[test]
    fn a_list_has_one_kind_of_amounts() {
        let list = read("4GiB, 512m").unwrap();
        assert_eq!(list, Amounts { amounts: vec![4096, 512], measure: MIB_EACH });
        assert_eq!(read("25%,50%").unwrap().amounts, [2500, 5000]);
        assert_eq!(read("25%,4GiB"), Err(BadAmount::Mixed));
    }

    #[test]
    fn ambiguous_or_meaningless_amounts_are_refused() {
        for bare in ["4", "4096", "4.5"] {
            assert_eq!(read(bare), Err(BadAmount::Bare(bare)));
        }
        for text in ["", "GiB", "-4GiB", "4GiBs", "4e9", "0x4g", ".5g", "1.2.3g", "1.0001g", "４g"]
        {
            assert_eq!(read(text), Err(BadAmount::Unreadable(text)), "{text}");
        }
        assert_eq!(read("4g,,4g"), Err(BadAmount::Unreadable("")));
        assert_eq!(read("101%"), Err(BadAmount::MoreThanAll("101%")));
        assert_eq!(read("512k"), Err(BadAmount::TooSmall("512k")));
        assert_eq!(read("0.001%"), Err(BadAmount::TooSmall("0.001%")));
        assert_eq!(
            read("99999999999999999999g"),
            Err(BadAmount::Unreadable("99999999999999999999g"))
        );
        assert_eq!(
            read("18446744073709551615t"),
            Err(BadAmount::Unreadable("18446744073709551615t"))
        );
    }

    proptest! {
        #[test]
        fn whole_mib_are_read_back(mib in 1..1u64 << 40) {
            prop_assert_eq!(size_mib(&format!("{mib}MiB")), Some(mib));
            prop_assert_eq!(size_mib(&format!("{mib}")), None);
        }

        #[test]
        fn no_text_panics(text in ".{0,20}") {
            let _ = read(&text);
        }
    }
}
