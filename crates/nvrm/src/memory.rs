//! How much video memory an allocation asks for, by the parameters of its class.

use super::call::Reader;
use super::layout::{Layout, Meaning};
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use super::number::*;
use super::refuse::{CallName, Refusal};
use super::release::{Key, Release};

/// What `NV_MEMORY_ALLOCATION_PARAMS` ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Bytes asked for. The driver rounds up, to its page size at least; what it gave is
    /// [`given_bytes`] afterwards.
    pub size_bytes: u64,
    /// The struct.
    pub layout: &'static Layout,
}

/// The size of the parameters of an allocation of `class`, where they are to be read; `None` where
/// they aren't known.
///
/// So many are to be copied and given to the driver, whatever the caller stated: the driver goes
/// by the class alone (`serverAllocApiCopyIn`, alloc_free.c; `rmapiGetClassAllocParamSize`,
/// resource_desc.c), and callers state what they were built with, as the libraries of CUDA's
/// forward compatibility are for a later driver.
///
/// # Errors
///
/// Where its parameters may have grown with a branch that isn't known, as the caller states another
/// size.
pub fn params_size(
    release: &Release,
    class: u32,
    stated: Option<u32>,
) -> Result<Option<usize>, Refusal> {
    let key = Key::Class(class);
    let known = release.layouts(key);
    let Some(first) = known.first() else { return Ok(None) };
    // Old callers state nothing, as 0.
    let stated = stated.and_then(|stated| usize::try_from(stated).ok()).filter(|size| *size != 0);
    match stated {
        Some(size) if known.iter().any(|layout| layout.size() == size) => Ok(Some(size)),
        Some(size) if release.is_of_new_branch() => Err(Refusal::UnknownSize {
            driver: release.version(),
            call: CallName(key),
            stated: size,
            known: known.iter().map(Layout::size).collect(),
        }),
        _ => Ok(Some(first.size())),
    }
}

/// What the copy `bytes` of the parameters of an allocation of `class` ask for.
///
/// # Errors
///
/// Where they are not of a size of this driver's, or the class has none of this kind.
pub fn decode(release: &Release, class: u32, bytes: &[u8]) -> Result<Memory, Refusal> {
    let key = Key::Class(class);
    let reader = Reader { release, call: CallName(key) };
    let view = reader.view(key, bytes)?;
    Ok(Memory { size_bytes: reader.long(view, Meaning::Size)?, layout: view.layout() })
}

/// The engine that a channel group asks for (`NV2080_ENGINE_TYPE_*`), by its parameters; 0 where they
/// say none, and the driver chooses.
#[must_use]
pub fn group_engine(release: &Release, bytes: &[u8]) -> u32 {
    let layout = release.layout(Key::Class(KEPLER_CHANNEL_GROUP_A), bytes.len());
    let view = layout.and_then(|layout| layout.view(bytes));
    view.and_then(|view| view.u32(Meaning::Kind)).unwrap_or(0)
}

/// The bytes the driver gave, from the struct as it came back: its limit and one.
///
/// `None` where `bytes` are not of that struct, or say 2⁶⁴.
#[must_use]
pub fn given_bytes(layout: &'static Layout, bytes: &[u8]) -> Option<u64> {
    layout.view(bytes)?.u64(Meaning::Limit)?.checked_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn release(text: &str) -> Release {
        Release::of(text.parse().unwrap()).unwrap()
    }

    /// The size is the driver's whatever is stated; in an unknown branch, another stated size is
    /// refused.
    #[test]
    fn params_size_is_the_drivers_except_unknown_branches() {
        assert_eq!(params_size(&release("530.41.03"), 0xc7c0, Some(8)), Ok(None));
        for stated in [None, Some(0), Some(120), Some(128), Some(u32::MAX)] {
            for (driver, size) in [("535.161.08", 120), ("535.309.01", 120), ("550.54.14", 128)] {
                assert_eq!(params_size(&release(driver), 0x40, stated), Ok(Some(size)));
            }
        }
        let new = release("900.10.01");
        for stated in [None, Some(0), Some(128)] {
            assert_eq!(params_size(&new, 0x40, stated), Ok(Some(128)));
        }
        let refusal = params_size(&new, 0x40, Some(136)).unwrap_err();
        assert_eq!(refusal.to_string(), "driver 900.10.01: class 0x40 of 136 bytes, known is 128");
    }

    #[test]
    fn what_was_given_is_the_limit_and_one() {
        let layout = release("535.161.08").layouts(Key::Class(0x40)).first().unwrap();
        let mut bytes = vec![0; 120];
        bytes[88..96].copy_from_slice(&0x1f_ffff_u64.to_le_bytes());
        assert_eq!(given_bytes(layout, &bytes), Some(0x20_0000));
        bytes[88..96].fill(0xff);
        assert_eq!(given_bytes(layout, &bytes), None);
        assert_eq!(given_bytes(layout, &bytes[1..]), None);
    }
}
