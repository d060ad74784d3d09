//! Controls that name clients in their parameters: none but the caller's own.
//!
//! The driver finds a client by its handle and doesn't check whose it is
//! (`serverGetClientUnderLock`), and handles of clients are counted up. The list is made from the
//! headers' structs: the test of the headers looks for fields of type `NvHandle` that name a
//! client, and fails for a control that is executed and isn't in here. Offsets are alike from
//! 515.43.04 to 595.45.04.

/// Where the parameters of a control name clients.
#[derive(Debug, Clone, Copy)]
pub struct Named {
    /// The control.
    pub command: u32,
    /// Its struct, as upstream calls it.
    pub name: &'static str,
    /// The field, as upstream calls it.
    pub field: &'static str,
    /// Where that is.
    pub offset: usize,
    /// How many there are, where it's a list.
    pub list: Option<List>,
}

/// A list of clients in parameters.
#[derive(Debug, Clone, Copy)]
pub struct List {
    /// The field that says how many are meant, as upstream calls it.
    pub count: &'static str,
    /// Where that is.
    pub offset: usize,
    /// The most entries that the array can hold.
    pub most: usize,
}

const fn named(command: u32, name: &'static str, field: &'static str, offset: usize) -> Named {
    Named { command, name, field, offset, list: None }
}

/// A list of clients, meant as far as `count` at an offset says, of `most`.
const fn listed(of: Named, count: &'static str, offset: usize, most: usize) -> Named {
    Named { list: Some(List { count, offset, most }), ..of }
}

/// In order.
#[rustfmt::skip]
pub static NAMED: &[Named] = &[
    named(0x0000_0d03, "NV0000_CTRL_CLIENT_GET_ACCESS_RIGHTS_PARAMS", "hClient", 4),
    named(0x2080_1123, "NV2080_CTRL_FIFO_GET_CHANNEL_GROUP_UNIQUE_ID_INFO_PARAMS", "hClient", 0),
    listed(
        named(0x2080_1124, "NV2080_CTRL_FIFO_QUERY_CHANNEL_UNIQUE_ID_PARAMS", "hClients", 0),
        "numChannels", 1024, 128,
    ),
    named(0x2080_1208, "NV2080_CTRL_GR_CTXSW_ZCULL_BIND_PARAMS", "hClient", 0),
    named(0x208f_0403, "NV208F_CTRL_FIFO_GET_CHANNEL_STATE_PARAMS", "hClient", 4),
];

/// Whether all clients that a control names are `client`, which makes it.
#[must_use]
pub fn are_all(client: u32, command: u32, params: &[u8]) -> bool {
    let Ok(found) = NAMED.binary_search_by_key(&command, |named| named.command) else {
        return true;
    };
    let Some(Named { offset, list, .. }) = NAMED.get(found) else { return false };
    let word = |at: usize| Some(u32::from_le_bytes(*params.get(at..)?.first_chunk()?));
    let Some(List { offset: at, most, .. }) = list else { return word(*offset) == Some(client) };
    let Some(count) = word(*at).and_then(|count| usize::try_from(count).ok()) else {
        return false;
    };
    count <= *most && (0..count).all(|number| word(offset + 4 * number) == Some(client))
}

#[cfg(test)]
mod tests {
    use super::super::{ControlKind, known};
    use super::*;

    /// Parameters that name these clients, of which so many are meant.
    fn params(named: &Named, count: u32, clients: &[u32]) -> Vec<u8> {
        let mut params = vec![0; 4096];
        let mut set =
            |at: usize, word: u32| params[at..at + 4].copy_from_slice(&word.to_le_bytes());
        for (at, client) in clients.iter().enumerate() {
            set(named.offset + 4 * at, *client);
        }
        if let Some(list) = named.list {
            set(list.offset, count);
        }
        params
    }

    #[test]
    fn each_is_executed_and_they_are_in_order() {
        assert!(NAMED.is_sorted_by_key(|named| named.command));
        for named in NAMED {
            let known = known(named.command);
            assert!(
                matches!(known, Some(ControlKind::Flat | ControlKind::Nested)),
                "{}",
                named.name
            );
        }
    }

    #[test]
    fn caller_cannot_name_anothers_client() {
        for named in NAMED {
            let is_its = |params: &[u8]| are_all(7, named.command, params);
            assert!(is_its(&params(named, 1, &[7])), "{}", named.name);
            for other in [0, 6, 8, u32::MAX] {
                assert!(!is_its(&params(named, 1, &[other])), "{} {other}", named.name);
            }
            assert!(!is_its(&[]) && !is_its(&params(named, 1, &[7])[..named.offset + 3]));
        }
        assert!(are_all(7, 0x2080_014a, &[]));
    }

    /// Of a list of clients, those that its count means are checked.
    #[test]
    fn counted_clients_of_a_list_are_checked() {
        for (named, list) in NAMED.iter().filter_map(|named| Some((named, named.list?))) {
            let most = u32::try_from(list.most).unwrap();
            let all = vec![7; list.most];
            for (count, clients, is_its) in [
                (0, &[][..], true),
                (1, &[7, 8], true),
                (2, &[7, 8], false),
                (most, &all, true),
                (most + 1, &all, false),
                (u32::MAX, &all, false),
            ] {
                let params = params(named, count, clients);
                assert_eq!(are_all(7, named.command, &params), is_its, "{} {count}", named.name);
            }
        }
    }
}
