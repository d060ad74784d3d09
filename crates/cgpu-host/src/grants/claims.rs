//! Where the claims lie that are prepared on this node: [`Claims`], a file for each in a directory of root's.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cgpu_core::request::claim::{CLAIM_FORMAT, Claim, ShareName};
use cgpu_core::request::grant::Grant;

use super::directory::Directory;
use super::{GrantError, Grants};

/// The directory below that of the device plugin's grants, whose lock is theirs, too: a GPU is given out by one of both.
const CLAIMS: &str = "claims";

/// The claims of this node.
#[derive(Debug, Clone)]
pub struct Claims {
    grants: Grants,
    directory: Directory,
}

/// What was in a node's records when one was to be changed.
#[derive(Debug)]
pub struct Given {
    /// Every claim.
    pub claims: Vec<Claim>,
    /// What the device plugin gave.
    pub grants: Vec<Grant>,
}

impl Claims {
    /// The claims next to the grants in `grants`, which may be missing: then there are none.
    #[must_use]
    pub fn at(grants: &Path) -> Self {
        Claims { grants: Grants::at(grants), directory: Directory::at(&grants.join(CLAIMS)) }
    }

    /// Where their records lie.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Makes the directory, where it isn't there.
    ///
    /// # Errors
    ///
    /// If it can't be made or trusted.
    pub fn make_directory(&self) -> Result<(), GrantError> {
        self.grants.directory.make()?;
        self.directory.make()
    }

    /// The claim with that UID.
    ///
    /// # Errors
    ///
    /// If its record can't be read or trusted.
    pub fn find(&self, uid: &str) -> Result<Option<Claim>, GrantError> {
        match self.path(uid) {
            Some(path) if self.is_trusted()? => self.read(&path),
            _ => Ok(None),
        }
    }

    /// The claims that the items of a container's environment name, by UID.
    ///
    /// # Errors
    ///
    /// If a record can't be read or trusted.
    pub fn named(&self, env: &[&str]) -> Result<BTreeMap<String, Claim>, GrantError> {
        let mut found = BTreeMap::new();
        for name in env.iter().filter_map(|item| ShareName::of(item)?.ok()) {
            found.extend(self.find(name.claim)?.map(|claim| (claim.uid.clone(), claim)));
        }
        Ok(found)
    }

    /// All claims.
    ///
    /// # Errors
    ///
    /// If one of the records can't be read or trusted: what it gave isn't known.
    pub fn all(&self) -> Result<Vec<Claim>, GrantError> {
        if !self.is_trusted()? {
            return Ok(Vec::new());
        }
        let read = self.directory.files()?.into_iter().map(|path| self.read(&path));
        read.filter_map(Result::transpose).collect()
    }

    /// Writes the record that `decide` makes by what is given, and returns it.
    ///
    /// # Errors
    ///
    /// If `decide` refuses, or a record can't be read or written.
    pub fn put<E: From<GrantError>>(
        &self,
        decide: impl FnOnce(&Given) -> Result<Claim, E>,
    ) -> Result<Claim, E> {
        self.make_directory()?;
        let _lock = self.grants.directory.lock()?;
        let given = Given { claims: self.all()?, grants: self.grants.all()? };
        let claim = decide(&given)?;
        let path = self.path(&claim.uid).ok_or_else(|| GrantError::Unreadable {
            path: self.directory.path().to_owned(),
            why: format!("{:?} is no UID of a claim", claim.uid),
        })?;
        self.directory.write(path, &claim)?;
        Ok(claim)
    }

    /// Removes the record of the claim with that UID, if there is one.
    ///
    /// # Errors
    ///
    /// If it can't be removed.
    pub fn remove(&self, uid: &str) -> Result<(), GrantError> {
        let Some(path) = self.path(uid) else { return Ok(()) };
        if !self.is_trusted()? {
            return Ok(());
        }
        let _lock = self.grants.directory.lock()?;
        self.directory.remove(path)
    }

    fn is_trusted(&self) -> Result<bool, GrantError> {
        Ok(self.grants.directory.is_trusted()? && self.directory.is_trusted()?)
    }

    fn read(&self, path: &Path) -> Result<Option<Claim>, GrantError> {
        self.directory.read(path, |claim: &Claim| claim.format, CLAIM_FORMAT)
    }

    /// Where the record of a claim lies. `None` if that is no UID.
    fn path(&self, uid: &str) -> Option<PathBuf> {
        let is_uid = (1..=63).contains(&uid.len())
            && uid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        is_uid.then(|| self.directory.path().join(format!("{uid}.json")))
    }
}

#[cfg(test)]
mod tests {
    use cgpu_core::request::claim::{ClaimedGpu, Share};
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn claim(uid: &str) -> Claim {
        let gpu = ClaimedGpu {
            uuid: "GPU-a".to_owned(),
            bytes: 1 << 30,
            whole: false,
            pool: "node".to_owned(),
            device: "gpu-a".to_owned(),
            share_id: None,
        };
        let token = "1".repeat(32);
        Claim {
            format: CLAIM_FORMAT,
            namespace: "team".to_owned(),
            name: "c".to_owned(),
            uid: uid.to_owned(),
            pods: vec!["p".to_owned()],
            of_one_pod: true,
            shares: vec![Share { request: "gpu".to_owned(), token, gpus: vec![gpu], weight: None }],
        }
    }

    fn place() -> (tempfile::TempDir, Claims) {
        let directory = tempfile::tempdir().unwrap();
        let claims = Claims::at(&directory.path().join("grants"));
        (directory, claims)
    }

    #[test]
    fn claims_are_kept_until_they_are_removed() {
        let (_directory, claims) = place();
        assert_eq!(claims.all().unwrap(), []);
        claims.remove("u1").unwrap();
        claims
            .put(|given| {
                assert!(given.claims.is_empty());
                Ok::<_, GrantError>(claim("u1"))
            })
            .unwrap();
        assert_eq!(claims.find("u1").unwrap(), Some(claim("u1")));
        let (name, value) = claim("u1").variable(&claim("u1").shares[0]);
        let named = claims.named(&[&format!("{name}={value}"), "CGPU_GRANT_2=x"]).unwrap();
        assert_eq!(named.keys().collect::<Vec<_>>(), ["u1"]);
        for _ in 0..2 {
            claims.remove("u1").unwrap();
        }
        assert_eq!(claims.find("u1").unwrap(), None);
        assert_eq!(claims.find("../lock").unwrap(), None);
    }

    #[test]
    fn doubtful_claims_count_as_unknown() {
        let (directory, claims) = place();
        claims.put(|_| Ok::<_, GrantError>(claim("u1"))).unwrap();
        let file = directory.path().join("grants/claims/u1.json");
        let mode = |mode| fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        mode(0o666);
        assert!(matches!(claims.all(), Err(GrantError::Untrusted { .. })));
        mode(0o600);
        fs::write(&file, "{").unwrap();
        assert!(matches!(claims.find("u1"), Err(GrantError::Unreadable { .. })));
        assert!(claims.put(|_| Ok::<_, GrantError>(claim("u2"))).is_err(), "the sum isn't known");
        fs::write(&file, serde_json::to_vec(&Claim { format: 9, ..claim("u1") }).unwrap()).unwrap();
        let error = claims.all().unwrap_err().to_string();
        assert!(error.contains("of format 9"), "{error}");
    }
}
