//! The number of each file that the keeper keeps for the next worker. The keeper knows only this number.

use crate::gate::wire::Notice;

/// These bits tell the kinds of files apart. An export's number has neither.
const UVM: u64 = 1 << 63;
const CLIENT: u64 = 1 << 62;

/// How many bits of a number say which of a client's files it is.
const PLACE_BITS: u32 = 8;

/// A file that the keeper keeps or is to keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeptFile {
    /// A file that memory was exported to, by the export's number.
    Export(u64),
    /// A file of the monitor's own client of the driver. `place` says which one; the client's own file is the first.
    Client { client: u32, place: u8 },
    /// A file of UVM's, by its number.
    Uvm(u32),
}

impl KeptFile {
    /// The file with this number.
    pub(crate) fn of(number: u64) -> Self {
        let [.., client_3, client_2, client_1, client_0, place] = number.to_be_bytes();
        let client = u32::from_be_bytes([client_3, client_2, client_1, client_0]);
        match number {
            number if number & UVM != 0 => {
                KeptFile::Uvm(u32::from_be_bytes([client_2, client_1, client_0, place]))
            }
            number if number & CLIENT != 0 => KeptFile::Client { client, place },
            number => KeptFile::Export(number),
        }
    }

    /// The file's number. The numbers of a client's files are ordered by `place`.
    pub(crate) fn number(self) -> u64 {
        match self {
            KeptFile::Export(number) => number,
            KeptFile::Client { client, place } => {
                CLIENT | u64::from(client) << PLACE_BITS | u64::from(place)
            }
            KeptFile::Uvm(number) => UVM | u64::from(number),
        }
    }

    /// The notice that makes the keeper keep the file. The descriptor comes with the notice.
    pub(crate) fn keep(self) -> Notice {
        Notice::Keep { number: self.number() }
    }

    /// The notice that makes the keeper close the file.
    pub(crate) fn let_go(self) -> Notice {
        Notice::LetGo { number: self.number() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_known_by_its_number() {
        let client = |client, place| KeptFile::Client { client, place };
        for file in [
            KeptFile::Export(1),
            KeptFile::Export(CLIENT - 1),
            KeptFile::Uvm(0),
            KeptFile::Uvm(u32::MAX),
            client(0, 0),
            client(0xc1d0_0001, 32),
            client(u32::MAX, u8::MAX),
        ] {
            assert_eq!(KeptFile::of(file.number()), file);
        }
        assert!(
            client(7, 0).number() < client(7, 1).number(),
            "the client's own file is the first"
        );
    }
}
